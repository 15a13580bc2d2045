"""The offline benchmark counts right: on a tiny model for every workload, on the real one from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

from benchmarks.offline import Measurement, as_text, measure, measure_shape, parse_arguments, run_waves
from benchmarks.workloads import WORKLOADS, SegmentRequest, multiturn, stats
from radix_jax import Engine, EngineConfig
from radix_jax.models.llama import Llama, LlamaConfig

ROOT = Path(__file__).parent.parent.parent
TINY = LlamaConfig(
    vocab_size=40000,  # the workloads' ids go up to there
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(TINY, rngs=nnx.Rngs(0))


def tiny_engine(model: Llama, page_size: int, *, cache: bool = True) -> Engine:
    """Few buckets, so that little is compiled; the pool holds every workload."""
    config = EngineConfig(
        page_size=page_size,
        num_pages=16384 // page_size + 1,
        max_model_len=1024,
        max_running_requests=8,
        max_prefill_tokens=256,
        enable_prefix_cache=cache,
        compile_cache_dir="",
    )
    return Engine(model, config=config)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_prefill_is_the_minimum_at_page_size_1(workload: str, model: Llama) -> None:
    expected = stats(WORKLOADS[workload]())
    measured = measure(tiny_engine(model, page_size=1), workload)
    assert measured.prefill_computed == expected.min_prefill
    assert measured.prompt_tokens == expected.prompt_tokens
    assert measured.output_tokens == expected.output_tokens
    assert measured.compiles == 5
    assert measured.compiles_timed == 0
    assert 0 <= measured.padding_waste < 1
    assert measured.peak_rss_bytes > 50e6


def test_without_the_cache_all_is_computed(model: Llama) -> None:
    engine = tiny_engine(model, page_size=16, cache=False)
    requests = multiturn(conversations=2, turns=3, max_new=4)
    generated = run_waves(engine, requests)
    assert engine.stats().num_prefill_tokens == stats(requests).prompt_tokens
    assert {len(ids) for ids in generated.values()} == {4}
    assert sorted(generated) == list(range(6))


def test_a_turn_continues_what_was_generated(model: Llama) -> None:
    requests = multiturn(conversations=2, turns=2, max_new=4)
    generated = run_waves(tiny_engine(model, page_size=1), requests)
    for last in requests[2:]:
        first = requests[last.parent or 0]
        alone = [SegmentRequest(0, 0, None, False, 0, (*first.ids, *generated[first.id], *last.ids), 4)]
        assert run_waves(tiny_engine(model, page_size=1), alone)[0] == generated[last.id]


def test_line_for_people_holds_the_counts() -> None:
    measured = Measurement(
        workload="shared",
        seconds=2.0,
        output_tokens=64,
        output_tokens_per_s=32.0,
        prompt_tokens=34816,
        prefill_computed=2560,
        peak_rss_bytes=10**9,
        compiles=3,
        compile_s=4.2,
        compiles_timed=0,
        padding_waste=0.125,
        dtype="float32",
        page_size=16,
        prefix_cache=True,
    )
    line = as_text(measured)
    for part in ("shared", "32.0 output tokens/s", "2,560 of 34,816", "3 compiles"):
        assert part in line


def test_random_weights_of_a_shape_run_a_workload() -> None:
    settings = EngineConfig(
        page_size=16, num_pages=1025, max_model_len=1024, max_running_requests=8, max_prefill_tokens=64
    )
    measured = measure_shape(TINY, settings, "tree")
    assert measured.output_tokens == stats(WORKLOADS["tree"]()).output_tokens
    assert measured.dtype == "float32"


@pytest.mark.parametrize("arguments", [["--shape", "llama3-8b"], ["--random-weights"]])
def test_a_shape_needs_the_word_that_its_weights_are_random(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert "--shape and --random-weights go together" in capsys.readouterr().err


def test_unknown_shapes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--shape", "llama3-9b", "--random-weights"])
    assert "no shape named llama3-9b; there are smollm2-135m, " in capsys.readouterr().err
    assert parse_arguments(["--shape", "llama3-8b", "--random-weights"]).shape == "llama3-8b"


def test_unknown_workloads_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--workloads", "shared,sharde"])
    assert "no workload named sharde; there are shared, multiturn, noshare, tree" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_command_line_on_the_real_model() -> None:
    command = [sys.executable, "-m", "benchmarks.offline", "--json", "--workloads", "multiturn", "--page-size", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    measured = Measurement(**json.loads(line))
    assert measured.prefill_computed == 2344
    assert measured.output_tokens == 1536
    assert measured.output_tokens_per_s == pytest.approx(1536 / measured.seconds, rel=1e-2)
    assert measured.compiles_timed == 0
