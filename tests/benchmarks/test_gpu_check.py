"""The check of a GPU, every section of it, on tiny shapes by interpretation; and what it says without a GPU."""

import dataclasses
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_check, gpu_numerics
from benchmarks.gpu_attention import make_work
from benchmarks.gpu_check import Check, main
from benchmarks.gpu_report import Report
from benchmarks.gpu_sizes import ExtendShape, GpuSizes, ModelSizes, full_sizes, llama3_8b_sizes
from benchmarks.gpu_timing import Compiler, time_program
from benchmarks.offline import run_waves
from benchmarks.random_weights import random_params
from benchmarks.workloads import WORKLOADS
from radix_jax import Engine, EngineConfig
from radix_jax.models.llama import LlamaConfig
from radix_jax.pallas_kernels.paged_attention.oracle_grid import GRID
from radix_jax.plan import Bucket, StepPlan
from radix_jax.runner import StepHandle

TINY_MODEL = LlamaConfig(
    vocab_size=40000,  # the workloads' ids go up to there
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
TINY = GpuSizes(
    interpret=True,
    dtype="float32",
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    page_size=16,
    pool_slots=512,
    small_pool_slots=256,
    decode=((2, 64), (64, 64)),
    swept=(2, 64),
    page_sizes=(1,),
    extend=(ExtendShape(2, 32, 0),),
    write_tokens=(4,),
    write_dtypes=("bfloat16", "float8_e4m3fn"),
    write_pool_slots=64,
    matmul_size=64,
    copy_bytes=2**16,
    num_variants=1,
    program_s=1e-12,
    large_page_size=16,
    large_pools=(("float8_e4m3fn", 40),),
    model=ModelSizes(
        shape=TINY_MODEL,
        settings=EngineConfig(
            page_size=16,
            num_pages=1025,
            max_model_len=1024,
            max_running_requests=8,
            max_prefill_tokens=64,
            attention_backend="xla",
            compile_cache_dir="",
        ),
        decode=((4, 64), (1, 64)),
        prefill_len=64,
        workload="tree",
        buckets=(Bucket("decode", 8, 8, 64), Bucket("prefill", 64, 8, 64)),
    ),
)
SECTIONS = {
    *("pools", "steps", "decode", "extend", "numerics", "baselines", "write", "blocks", "writes are right"),
    *("large pools", "whole shapes", "compiles", "peaks", "offline", "memory"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The JSON of a whole run, as it is in the file."""
    out = tmp_path_factory.mktemp("check") / "check.json"
    report = Report(10_000.0, patience=100.0, out=out, table=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        # Bursts as short as can be: no time is asserted here.
        patch.setattr(time_program, "__kwdefaults__", {"length": 1, "sample_s": 1e-9, "num_samples": 1})
        # Most of the time goes into compiling what is interpreted.
        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", True)
        grid = tuple(case for case in GRID if case.name == "mixed")
        Check(TINY, report, grid).run()
        jax.config.update("jax_disable_most_optimizations", before)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_every_section_runs_without_an_error(found: dict) -> None:
    assert set(found["sections"]) == SECTIONS
    assert {name: section["error"] for name, section in found["sections"].items() if "error" in section} == {}


@pytest.mark.slow
def test_what_a_cpu_can_not_do_is_dropped_and_nothing_else(found: dict) -> None:
    dropped = [drop for section in found["sections"].values() for drop in section.get("dropped", ())]
    assert {drop["what"] for drop in dropped} == {"ours at 64x64", "dense cudnn at 2x32"}
    assert "needs 4096 slots, the pool has 512" in str(dropped)


@pytest.mark.slow
def test_numerics_are_right_everywhere(found: dict) -> None:
    rows = [row for section in found["sections"].values() for row in section.get("rows", ())]
    assert sum("ok" in row for row in rows) == 6  # 1 grid, 2 writes, 1 pool, 2 shapes
    assert all(row["ok"] for row in rows if isinstance(row.get("ok"), bool))
    (grid,) = found["sections"]["numerics"]["rows"]
    assert grid["ok"] == grid["cases"] == 2  # ours and xla
    assert {target["name"]: target["passed"] for target in found["targets"]}[
        "numerics: share of the grid's cases that are right"
    ]


@pytest.mark.slow
def test_all_forms_of_a_shape_agree(found: dict) -> None:
    rows = [row for name in ("decode", "baselines", "blocks") for row in found["sections"][name]["rows"]]
    forms = {row["form"] for row in rows}
    assert {"ours", "ours, page 1", "xla", "dense xla", "jax.paged_attention"} <= forms
    compared = [row["differs_by"] for row in rows if "differs_by" in row]
    assert len(compared) == 6  # two pools, another page size, two baselines, other blocks
    assert max(compared) < 1e-4
    assert all(row["us"] > 0 and row["share_of_bandwidth"] > 0 for row in rows)


@pytest.mark.slow
def test_pools_stay_where_they_are(found: dict) -> None:
    rows = [row for name in ("steps", "write", "offline") for row in found["sections"][name]["rows"]]
    assert [row["pool_in_place"] for row in rows] == [True] * len(rows)
    cached, uncached = found["sections"]["offline"]["rows"]
    assert cached["prefill_computed"] < uncached["prefill_computed"] == uncached["prompt_tokens"]
    assert cached["output_tokens"] == uncached["output_tokens"] > 0
    for row in (cached, uncached):
        assert row["compiles_timed"] == row["compiles_late"] == 0


def test_work_counts_what_has_to_be_read_and_computed() -> None:
    work = make_work(TINY, ExtendShape(2, 16, 32), num_slots=512)
    assert work.kv_bytes == 2 * 48 * (2 * 2 * 16) * 4
    seen = sum(32 + i + 1 for i in range(16))
    assert work.num_flops == 2 * (2 * 2 * seen) * 4 * 16  # rows, two products of a multiply and an add, heads, lanes
    assert (work.num_layers, work.pages_per_layer) == (512 // 96, 6)
    assert sorted(np.asarray(work.page_table).ravel()) == list(range(6))
    assert ExtendShape(2, 16, 32).name == "2x16 over 32"
    assert ExtendShape(64, 1, 4095).name == "64x4,096"


@pytest.mark.slow
def test_targets_name_what_was_aimed_at(found: dict) -> None:
    aimed = {target["name"]: target["at_least"] for target in found["targets"]}
    assert aimed["decode 2x64: share of copy bandwidth"] == 0.85
    assert aimed["extend 2x32: share of matmul peak"] == 0.6


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "check.json")])
    said = capsys.readouterr()
    assert said.err == "no GPU: jax sees cpu only; nothing was run\n"
    assert json.loads(said.out)["device"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_section_that_raises_is_noted_and_the_next_one_runs(tmp_path: Path) -> None:
    lines = io.StringIO()
    report = Report(10.0, out=tmp_path / "check.json", table=lines)
    with report.section("bad", 1.0):
        report.row(half=1)
        raise RuntimeError("no such thing")
    with report.section("good", 1.0):
        report.row(whole=2)
    kept = json.loads((tmp_path / "check.json").read_text())["sections"]
    assert kept["bad"]["error"] == "RuntimeError: no such thing"
    assert kept["bad"]["rows"] == [{"half": 1}]
    assert kept["good"]["rows"] == [{"whole": 2}]
    assert [path.name for path in tmp_path.iterdir()] == ["check.json"]
    assert not report.is_right
    lines.truncate(0)
    report.print_tables()
    assert [line.split() for line in lines.getvalue().splitlines() if "half" in line or "whole" in line] == [
        ["┃", "half", "┃"],
        ["┃", "whole", "┃"],
    ]


def test_out_of_time_everything_is_dropped_by_name() -> None:
    report = Report(0.5, table=io.StringIO())
    Check(dataclasses.replace(TINY, pool_slots=64, small_pool_slots=64), report).run()
    sections = report.as_dict()["sections"]
    assert set(sections) == SECTIONS
    for name in SECTIONS - {"pools", "compiles"}:
        assert [drop["why"] for drop in sections[name]["dropped"]][-1] == "out of time"


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_numerics.ours

    def wrong(*args: object, **kwargs: object) -> object:
        return lambda q, pool, table, *rest, **given: right(*args, **kwargs)(q, pool, table * 0, *rest, **given)

    monkeypatch.setattr(gpu_numerics, "ours", wrong)
    report = Report(1000.0, table=io.StringIO())
    with report.section("whole shapes", 1000.0):
        sizes = dataclasses.replace(TINY, extend=())
        gpu_numerics.check_whole_shapes(report, sizes, gpu_check.make_pool(sizes, 512))
    rows = report.as_dict()["sections"]["whole shapes"]["rows"]
    assert [row["ok"] for row in rows] == [False]
    assert not report.is_right


def test_chained_calls_are_counted_and_fed_on() -> None:
    compiler = Compiler(1)
    program = compiler.chain(lambda i, x, step: x + step * (i >= 0), jnp.zeros(()), jnp.ones(()), length=5).result()
    assert program(jnp.zeros(()), jnp.ones(())) == 5
    calls = []

    def counted(x: jax.Array) -> jax.Array:
        calls.append(1)
        return x + 1

    seconds_s, last = time_program(counted, np.zeros(()), length=2, sample_s=1e-9, num_samples=1)
    assert last == len(calls)
    assert seconds_s > 0


def test_what_was_not_compiled_in_time_is_given_up() -> None:
    compiler = Compiler(1)
    gate = compiler.submit(lambda: __import__("time").sleep(0.3))
    late = compiler.submit(lambda: 1)
    assert compiler.drain(0.01) == 2
    assert late.cancelled()
    gate.result()


@pytest.mark.parametrize("memory_gb", [12, 24, 60, 105])
def test_sizes_fit_the_memory(memory_gb: int) -> None:
    sizes = full_sizes(memory_gb * 10**9, "bfloat16")
    assert sizes.pool_slots * sizes.width * 2 < 0.11 * memory_gb * 1e9
    assert len(sizes.large_pools) == {12: 0, 24: 1, 60: 3, 105: 3}[memory_gb]
    assert (sizes.model is not None) == (memory_gb >= 60)
    assert (sizes.pool_slots == GpuSizes().pool_slots) == (memory_gb == 105)


@pytest.mark.parametrize("cached", [True, False])
def test_the_offline_workload_needs_no_bucket_that_is_not_compiled_ahead(
    cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = llama3_8b_sizes()
    settings = dataclasses.replace(sizes.settings, compile_cache_dir="", enable_prefix_cache=cached)
    engine = Engine(TINY_MODEL, random_params(TINY_MODEL, "float32"), settings)
    used: set[Bucket] = set()

    def dispatch(plan: StepPlan) -> StepHandle:
        used.update([plan.bucket, plan.bucket.copies] if plan.copies else [plan.bucket])
        return StepHandle(None, len(plan.rows))

    # What is sampled does not matter to what is planned: end-of-sequence is ignored.
    monkeypatch.setattr(engine.runner, "dispatch", dispatch)
    run_waves(engine, WORKLOADS[sizes.workload]())
    assert {bucket.kind for bucket in used} == {"prefill", "decode"}
    assert used <= set(sizes.buckets)
