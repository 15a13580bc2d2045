"""load_weights: what is missing, left over or misshapen is named before anything is read; memory; progress."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file
from small_files import LLAMA_METADATA, quantized, write_gguf, write_json

from radix_jax.arrays import WeightSpec
from radix_jax.checkpoints import Checkpoint, CheckpointError, load_weights, open_checkpoint

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float32),
}
SPECS = (
    WeightSpec(("a",), "a", "a", (2, 3), transpose=True),
    WeightSpec(("b",), "b", "b", (4,)),
    WeightSpec(("head",), "head", "head", (2, 3), optional=True),
)


@pytest.fixture(params=["gguf", "safetensors"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return make(request.param, tmp_path, TENSORS)


def make(kind: str, tmp_path: Path, tensors: dict[str, np.ndarray]) -> Checkpoint:
    """The tensors in a checkpoint of either format."""
    if kind == "gguf":
        return open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, tensors))
    save_file(tensors, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {})
    return open_checkpoint(tmp_path)


def never(spec: WeightSpec, array: np.ndarray) -> np.ndarray:
    """A `put` that must not be reached."""
    raise AssertionError(f"{spec.path} was read")


def test_leaves_come_in_order_as_put_made_them(checkpoint: Checkpoint) -> None:
    seen = []

    def put(spec: WeightSpec, array: np.ndarray) -> int:
        seen.append((spec, array))
        return len(seen)

    assert load_weights(checkpoint, SPECS, "float32", put, progress=False) == [1, 2, None]
    assert [spec for spec, _ in seen] == list(SPECS[:2])
    np.testing.assert_array_equal(seen[0][1], TENSORS["a"].T)
    np.testing.assert_array_equal(seen[1][1], TENSORS["b"])
    assert all(array.flags.c_contiguous for _, array in seen)


def test_missing_tensors_are_named(checkpoint: Checkpoint) -> None:
    wanted = [*SPECS, *(WeightSpec((f"x{i}",), f"x{i}", f"x{i}", (1,)) for i in range(7))]
    with pytest.raises(CheckpointError, match="lacks 7 tensors: x0, x1, x2, x3, x4 and 2 more: the download is inc"):
        load_weights(checkpoint, wanted, "float32", never, progress=False)
    with pytest.raises(CheckpointError, match="lacks tensor x0: ") as caught:
        load_weights(checkpoint, wanted[:4], "float32", never, progress=False)
    assert str(checkpoint.path) in str(caught.value)


def test_tensors_that_nothing_claims_are_named(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="holds tensor b, which the model has no place for") as caught:
        load_weights(checkpoint, SPECS[:1], "float32", never, progress=False)
    assert str(checkpoint.tensors["b"].file) in str(caught.value)


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_tables_that_the_model_computes_may_be_left(tmp_path: Path, kind: str) -> None:
    tables = {"rope_freqs.weight": np.ones(8, np.float32), "model.layers.0.self_attn.rotary_emb.inv_freq": TENSORS["b"]}
    checkpoint = make(kind, tmp_path, TENSORS | tables)
    assert len(load_weights(checkpoint, SPECS, "float32", lambda spec, array: array, progress=False)) == 3


def test_a_wrong_shape_is_told_with_both(checkpoint: Checkpoint) -> None:
    specs = [WeightSpec(("a",), "a", "a", (3, 2)), *SPECS[1:]]
    with pytest.raises(CheckpointError, match=r"tensor a has shape \(2, 3\), .* asks for \(3, 2\)") as caught:
        load_weights(checkpoint, specs, "float32", never, progress=False)
    assert str(checkpoint.tensors["a"].file) in str(caught.value)


def test_each_format_has_names_of_its_own(tmp_path: Path) -> None:
    specs = [WeightSpec(("w",), "model.w.weight", "blk.w", (4,))]
    (tmp_path / "s").mkdir()
    values = []
    for kind, name, folder in (("gguf", "blk.w", tmp_path), ("safetensors", "model.w.weight", tmp_path / "s")):
        checkpoint = make(kind, folder, {name: TENSORS["b"]})
        values += load_weights(checkpoint, specs, "float32", lambda spec, array: array, progress=False)
    np.testing.assert_array_equal(values[0], values[1])


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_never_two_full_copies(tmp_path: Path, kind: str) -> None:
    """Beside what is kept, a load holds about a piece of a tensor, not a second copy in another type."""
    values = {f"w{i}": np.full((4096, 512), i, np.float32) for i in range(6)}
    if kind == "gguf":
        values = {name: quantized(array, GGMLQuantizationType.Q8_0) for name, array in values.items()}
    checkpoint = make(kind, tmp_path, values)
    specs = [WeightSpec((name,), name, name, (4096, 512), transpose=True) for name in values]
    del values
    tracemalloc.start()
    leaves = load_weights(checkpoint, specs, "bfloat16", lambda spec, array: array, progress=False)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    weight_bytes = sum(leaf.nbytes for leaf in leaves)
    one_float_tensor = 4096 * 512 * 4
    assert kept < weight_bytes + one_float_tensor
    assert peak < weight_bytes + 2 * one_float_tensor < 2 * weight_bytes


def test_progress_goes_to_stderr(checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]) -> None:
    load_weights(checkpoint, SPECS, "float32", lambda spec, array: array)
    out, err = capfd.readouterr()
    assert out == ""
    assert f"loading {checkpoint.path.name}" in err
    load_weights(checkpoint, SPECS, "float32", lambda spec, array: array, progress=False)
    assert capfd.readouterr() == ("", "")
