"""The GPU kernels compiled for three generations: nothing spills, nothing is atomic, and nothing gets worse."""

import dataclasses
from pathlib import Path

import jax
import pytest
from aot_extra import needs_compilers

from benchmarks.gpu_static import SHAPES, Shape, StaticRow, measure, read_rows, record, supported
from radix_jax.aot.targets import target_of

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_static.json"
TARGETS = ("h200", "a100", "l4")
RELEASES = ("0.10.2", "0.12.0.1")
# Warps that a core holds at once: 2 for each of its 4 schedulers, and where the loads of a step decode from the
# memory of an H200 have to be hidden, 3.
MIN_WARPS, MIN_DECODE_WARPS_H200 = 8, 12
# Another release of ptxas may take a little more.
REGISTER_SLACK = 1.05
CHOSEN = (
    Shape(64),
    Shape(80, 1),
    Shape(96, 64),
    Shape(128),
    Shape(256),
    Shape(64, num_q_heads=9, num_kv_heads=3),
    Shape(128, num_q_heads=16, num_kv_heads=1),
    Shape(128, sliding_window=1000, logit_soft_cap=30.0),
    Shape(64, dtype="float32", kv_dtype="float32"),
    Shape(128, kv_dtype="float8_e5m2"),
)


def recorded(release: str) -> dict[tuple, StaticRow]:
    return {row.key: row for row in read_rows(RECORDED) if row.jax == release}


def test_the_record_is_whole() -> None:
    assert {row.jax for row in read_rows(RECORDED)} == set(RELEASES)
    shapes = {name: [shape for shape in SHAPES if supported(target_of(name), shape)] for name in TARGETS}
    for release in RELEASES:
        assert len(recorded(release)) == 4 * sum(map(len, shapes.values()))
    assert set(CHOSEN) <= set(SHAPES)


@pytest.mark.parametrize("row", read_rows(RECORDED), ids=lambda row: "-".join(map(str, (*row.key, row.jax))))
def test_the_record_is_within_budget(row: StaticRow) -> None:
    within_budget(row)


def test_a_release_is_recorded_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    row = read_rows(RECORDED)[0]
    newer = [dataclasses.replace(row, jax="9.9", target=target) for target in ("h200", "l4")]
    for rows in ([row], newer, [dataclasses.replace(newer[1], registers=1)]):
        record(file, rows)
    assert read_rows(file) == [row, newer[0], dataclasses.replace(newer[1], registers=1)]


def within_budget(row: StaticRow) -> None:
    target = target_of(row.target)
    assert row.spilled_bytes == 0
    assert row.atomics == 0
    assert row.shared_bytes <= target.shared_bytes_per_kernel
    programs = target.programs_per_core(
        registers=row.registers, shared_bytes=row.shared_bytes, num_threads=row.num_threads
    )
    is_decode_h200 = row.kernel.startswith("decode") and row.target == "h200"
    assert programs * row.num_threads // 32 >= (MIN_DECODE_WARPS_H200 if is_decode_h200 else MIN_WARPS)
    if row.kernel.startswith(("decode", "extend")):
        assert row.async_copies_16b > 0
        assert (row.tensor_core_instructions > 0) == (row.dtype != "float32"), "float32 is not rounded to TF32"


@pytest.mark.slow
@needs_compilers()
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", CHOSEN, ids=str)
def test_what_the_compiler_makes_today(shape: Shape, target: str) -> None:
    if not supported(target_of(target), shape):
        pytest.skip("the target lacks the pool's type")
    before = recorded(jax.__version__)
    for row in measure(target_of(target), shape):
        within_budget(row)
        if not before:
            continue  # a release without a record has its budget alone to keep
        then = before[row.key]
        assert row.registers <= then.registers * REGISTER_SLACK
        assert row.shared_bytes <= then.shared_bytes
        assert row.async_copies_16b >= then.async_copies_16b
        assert row.tensor_core_instructions >= then.tensor_core_instructions
