"""What the compilers make of the TPU kernels, against what was recorded."""

import importlib.metadata
import json
from pathlib import Path

import jax
import pytest
from aot_extra import needs_libtpu

from benchmarks.tpu_peers import Shape, kernels_of
from benchmarks.tpu_static import DECODE_SHAPES, MIXED_SHAPES, StaticRow, main, measure, read_rows, record
from radix_jax.aot.tpu_targets import tpu_target_of

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_static.json"


@pytest.mark.slow
@needs_libtpu()
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ["v5e", "v6e", "v7x"])
def test_no_kernel_of_ours_is_worse_than_recorded(name: str) -> None:
    release = jax.__version__, importlib.metadata.version("libtpu")
    recorded = {row.key: row for row in read_rows(RECORDED) if (row.jax, row.libtpu, row.target) == (*release, name)}
    if not recorded:
        pytest.skip(f"nothing is recorded of jax {release[0]} and libtpu {release[1]}")
    kernels = [one for one in kernels_of(name, DECODE_SHAPES, MIXED_SHAPES, [], None) if one.source == "ours"]
    rows, refused = measure(tpu_target_of(name), kernels)
    assert refused == []
    assert len(rows) == len(kernels)
    for row in rows:
        then = recorded[row.key]
        for figure in ("bundles_per_512", "bundles_per_seq", "main_loop_bundles", "spills", "copies", "vmem_mib"):
            assert getattr(row, figure) <= getattr(then, figure), (row.key, figure)


@needs_libtpu()
def test_a_kernel_by_its_path_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.tpu_static.DECODE_SHAPES", ())
    monkeypatch.setattr("benchmarks.tpu_static.MIXED_SHAPES", ())
    main(["--json"])
    assert json.loads(capsys.readouterr().out) == []


def test_a_record_keeps_other_targets(tmp_path: Path) -> None:
    old, other = (StaticRow(*_values(target, 100)) for target in ("v5e", "v6e"))
    path = tmp_path / "record.json"
    record(path, [old, other])
    new = StaticRow(*_values("v5e", 90))
    record(path, [new])
    assert {row.target: row.bundles_per_512 for row in read_rows(path)} == {"v5e": 90, "v6e": 100}


def _values(target: str, per_512: int) -> tuple[object, ...]:
    figures = (per_512, 400, 0, 0, 6.0, 32, 100, 0.5, 0.5, None)
    return ("ours", "decode", target, 16, 32, 8, 128, 2048, True, *figures, "bfloat16", "0.10.2", "0.0.52")


def test_shapes_are_named_once() -> None:
    kernels = kernels_of("v5e", DECODE_SHAPES, MIXED_SHAPES, [], None)
    assert len({(one.source, one.kernel, one.shape) for one in kernels}) == len(kernels)
    assert {one.source for one in kernels_of("v5e", (Shape(),), (), ["a.b:c"], 512)} > {"ours", "a.b:c"}
