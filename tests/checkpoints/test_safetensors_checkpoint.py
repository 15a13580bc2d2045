"""Safetensors folders: one file or shards by the index, float types, and damage of every kind."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from small_files import write_json, write_shards

from radix_jax.arrays import WeightSpec
from radix_jax.checkpoints import Checkpoint, CheckpointError, load_weights, open_checkpoint

RNG = np.random.default_rng(0)
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2}


def single(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A folder with one model.safetensors and a config."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", CONFIG)
    return folder


def load_all(checkpoint: Checkpoint, dtype: str = "float32", **options: Any) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint through load_weights."""
    specs = [WeightSpec((name,), name, "-", info.shape, **options) for name, info in checkpoint.tensors.items()]
    leaves = load_weights(checkpoint, specs, dtype, lambda spec, array: array, progress=False)
    return {str(spec.path[0]): leaf for spec, leaf in zip(specs, leaves, strict=True)}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_float_types_are_converted_once(tmp_path: Path, dtype: type, target: str) -> None:
    stored = RNG.normal(size=(5, 7)).astype(dtype)
    scalar = np.asarray(1.5, dtype)
    folder = single(tmp_path / "m", {"w": stored, "v": stored[0].copy(), "s": scalar})
    with open_checkpoint(folder) as checkpoint:
        loaded = load_all(checkpoint, target)
    assert loaded["w"].dtype == np.dtype(target)
    np.testing.assert_array_equal(loaded["w"], stored.astype(target))
    np.testing.assert_array_equal(loaded["v"], stored[0].astype(target))
    assert loaded["s"].shape == ()
    assert loaded["s"] == 1.5


def test_a_tensor_of_many_pieces_is_whole(tmp_path: Path) -> None:
    stored = RNG.normal(size=(2500, 1024)).astype(np.float32)
    folder = single(tmp_path / "m", {"w": stored})
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(load_all(checkpoint)["w"], stored)
        np.testing.assert_array_equal(load_all(checkpoint, transpose=True)["w"], stored.T)


def test_configuration_and_special_ids(tmp_path: Path) -> None:
    folder = single(tmp_path / "m", {"w": np.ones(2, np.float32)})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.hf_config == CONFIG
        assert (checkpoint.format, checkpoint.path) == ("safetensors", folder)
        assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (1, {2})
        info = checkpoint.tensors["w"]
        assert (info.shape, info.dtype, info.file) == ((2,), "F32", folder / "model.safetensors")


def test_only_indexed_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_shards(folder, [{"a": np.ones(2, np.float32)}, {"b": np.zeros(3, np.float32)}])
    save_file({"a": np.full(2, 9, np.float32)}, folder / "consolidated.safetensors")
    save_file({"c": np.full(2, 9, np.float32)}, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        loaded = load_all(checkpoint)
    assert set(loaded) == {"a", "b"}
    np.testing.assert_array_equal(loaded["a"], [1, 1])


def test_a_tensor_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    first, second = write_shards(folder, [{"a": np.ones(2, np.float32)}, {"b": np.zeros(3, np.float32)}])
    weight_map = {"a": second.name, "b": second.name, "z": first.name}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(CheckpointError, match=rf"{second.name} lacks tensor a, which"):
        open_checkpoint(folder)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    a, b, c = ({name: np.ones(2, np.float32)} for name in "abc")
    write_shards(tmp_path / "m", [a | b, a | c])
    with pytest.raises(CheckpointError, match="tensor a is in both"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "places tensor a in '../other/model.safetensors'"),
        ({"weight_map": {"a": 3}}, "places tensor a in 3"),
        ([], "holds a JSON list, not an object"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: Any, message: str) -> None:
    folder = single(tmp_path / "m", {"a": np.ones(2, np.float32)})
    write_json(folder / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors\.index\.json .*{message}"):
        open_checkpoint(folder)


def test_a_missing_or_damaged_config_is_named(tmp_path: Path) -> None:
    folder = single(tmp_path / "m", {"a": np.ones(2, np.float32)})
    (folder / "config.json").write_text('{"hidden_size": 6')
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(folder)


def test_a_quantised_tensor_is_refused_by_name(tmp_path: Path) -> None:
    folder = single(tmp_path / "m", {"a": np.ones((2, 2), np.int8)})
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match="tensor a has type I8"):
        load_all(checkpoint)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither safetensors nor a"):
        open_checkpoint(tmp_path)
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "other.safetensors")
    write_json(tmp_path / "config.json", CONFIG)
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .* it holds config.json, other.saf"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_companion_is_named(tmp_path: Path, name: str) -> None:
    folder = single(tmp_path / "m", {"a": np.ones(2, np.float32)})
    (folder / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(folder)


def test_an_id_that_is_no_id_is_named(tmp_path: Path) -> None:
    folder = single(tmp_path / "m", {"a": np.ones(2, np.float32)})
    write_json(folder / "generation_config.json", {"eos_token_id": [5, "nine"]})
    with pytest.raises(CheckpointError, match=r"generation_config\.json names 'nine'"):
        open_checkpoint(folder)


def test_a_closed_checkpoint_says_so(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(single(tmp_path / "m", {"a": np.ones(2, np.float32)}))
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        next(checkpoint.read_pieces("a"))
