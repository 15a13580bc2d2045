"""What compilers make of the TPU kernels: the record against what was promised, and the kernels against the record."""

import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from aot_extra import needs_libtpu

from benchmarks.tpu_peers import Measured, Shape, kernels_of
from benchmarks.tpu_static import DECODE_SHAPES, MIXED_SHAPES, StaticRow, main, measure, read_rows, record
from radix_jax.aot.tpu_targets import tpu_target_of

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_static.json"
TARGETS = ("v5e", "v6e", "v7x")
RELEASE = ("0.10.2", "0.0.52")
JAX_KERNELS = {
    "jax.experimental.pallas.ops.tpu.paged_attention",
    "jax.experimental.pallas.ops.tpu.ragged_paged_attention",
}
LLAMA, SMOLLM = (32, 8, 128), (9, 3, 64)
# What may not grow; bundles_per_512 and the like are None of kernels without a matmul.
FIGURES = (
    *("bundles", "bundles_per_512", "bundles_per_seq", "cycles_per_512", "main_loop_bundles"),
    *("spills", "copies", "vmem_mib"),
)


def ours(name: str, decode: tuple[Shape, ...], mixed: tuple[Shape, ...]) -> list[Measured]:
    return [one for one in kernels_of(name, decode, mixed, [], None) if one.source == "ours"]


def recorded(name: str) -> dict[tuple[Any, ...], StaticRow]:
    return {row.key: row for row in read_rows(RECORDED) if (row.jax, row.libtpu, row.target) == (*RELEASE, name)}


def row_of(target: str, kernel: str, heads: tuple[int, int, int], page_size: int = 16, **key: Any) -> StaticRow:
    key = {"source": "ours", "context": 2048, "kv_dtype": "bfloat16"} | key
    return recorded(target)[key["source"], kernel, target, page_size, *heads, key["context"], key["kv_dtype"]]


def check_against_the_record(name: str, kernels: list[Measured]) -> None:
    release = jax.__version__, importlib.metadata.version("libtpu")
    if release != RELEASE:
        pytest.skip(f"recorded are jax {RELEASE[0]} and libtpu {RELEASE[1]}, here are {release[0]} and {release[1]}")
    rows, refused = measure(tpu_target_of(name), kernels)
    assert refused == []
    assert len(rows) == len(kernels)
    for row in rows:
        then = dataclasses.asdict(recorded(name)[row.key])
        for figure in FIGURES:
            now = getattr(row, figure)
            assert (now is None) == (then[figure] is None), (row.key, figure)
            assert now is None or now <= then[figure], (row.key, figure)


@pytest.mark.parametrize("name", TARGETS)
def test_the_record_is_whole(name: str) -> None:
    assert {kernel.shape for kernel in ours(name, DECODE_SHAPES, MIXED_SHAPES)} == {*DECODE_SHAPES, *MIXED_SHAPES}
    rows = [row for row in recorded(name).values() if row.source == "ours"]
    assert len(rows) == len(DECODE_SHAPES) + 2 * len(MIXED_SHAPES)
    assert {row.source for row in recorded(name).values()} == {"ours", *JAX_KERNELS}


def test_decode_on_a_v5e_is_within_what_was_promised() -> None:
    """Bundles of 512 tokens of 64 rows, their new tokens written too; a short row takes its share and no block more."""
    assert row_of("v5e", "decode", LLAMA, 16).bundles_per_512 <= 966
    assert row_of("v5e", "decode", LLAMA, 128).bundles_per_512 <= 793
    assert row_of("v5e", "decode", SMOLLM).bundles_per_512 <= 619
    for heads, page_size in ((LLAMA, 16), (LLAMA, 128), (SMOLLM, 16)):
        row = row_of("v5e", "decode", heads, page_size)
        assert (row.spills, row.fills, row.kv_write) == (0, 0, True)
        assert row.vmem_mib <= 8
    for page_size in (16, 128):
        assert row_of("v5e", "decode", LLAMA, page_size, context=100).bundles_per_seq <= 3474 / 4


def test_decode_on_a_v6e_is_within_what_was_promised() -> None:
    for page_size in (16, 128):
        assert row_of("v6e", "decode", LLAMA, page_size).cycles_per_512 <= 1364


def test_chunks_keep_the_matrix_units_busy() -> None:
    for page_size in (16, 128):
        row = row_of("v5e", "mixed", LLAMA, page_size)
        assert row.peak_share >= 0.8
        assert row.vector_share < 0.95


def test_ours_take_less_than_those_of_jax() -> None:
    for source in JAX_KERNELS:
        theirs = row_of("v5e", "decode", LLAMA, source=source)
        assert row_of("v5e", "decode", LLAMA).bundles_per_512 < theirs.bundles_per_512


@pytest.mark.slow
@needs_libtpu()
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TARGETS)
def test_no_kernel_of_ours_is_worse_than_recorded(name: str) -> None:
    """One of each kind; decode as it was promised."""
    decode = [shape for shape in DECODE_SHAPES if shape.page_size == 16 and shape.head_dim in (64, 128)]
    decode = [shape for shape in decode if (shape.num_q_heads, shape.num_kv_heads) in (LLAMA[:2], SMOLLM[:2])]
    mixed = [shape for shape in MIXED_SHAPES if shape.num_q_heads == SMOLLM[0]]
    check_against_the_record(name, ours(name, (*decode,), (*mixed,)))


@pytest.mark.aot
@needs_libtpu()
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_no_kernel_of_ours_in_any_shape_is_worse_than_recorded(name: str) -> None:
    check_against_the_record(name, ours(name, DECODE_SHAPES, MIXED_SHAPES))


@needs_libtpu()
def test_without_shapes_there_are_no_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.tpu_static.DECODE_SHAPES", ())
    monkeypatch.setattr("benchmarks.tpu_static.MIXED_SHAPES", ())
    main(["--json"])
    assert json.loads(capsys.readouterr().out) == []


def test_a_record_keeps_other_targets(tmp_path: Path) -> None:
    row = read_rows(RECORDED)[0]
    old, other = (dataclasses.replace(row, target=target, bundles=100) for target in ("v5e", "v6e"))
    path = tmp_path / "record.json"
    record(path, [old, other])
    record(path, [dataclasses.replace(old, bundles=90)])
    assert {row.target: row.bundles for row in read_rows(path)} == {"v5e": 90, "v6e": 100}


def test_shapes_are_named_once() -> None:
    kernels = kernels_of("v5e", DECODE_SHAPES, MIXED_SHAPES, [], None)
    assert len({(one.source, one.kernel, one.shape) for one in kernels}) == len(kernels)
    assert {one.source for one in kernels_of("v5e", (Shape(),), (), ["a.b:c"], 512)} > {"ours", "a.b:c"}
