"""A missing shard is ignored and weights stay random: here nothing starts, and the message names the file."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_files import write_json, write_shards

from radix_jax.arrays import WeightSpec
from radix_jax.checkpoints import CheckpointError, load_weights, open_checkpoint

NAMES = ("a", "b", "c", "d", "e", "f")
SPECS = [WeightSpec((name,), name, name, (4, 8)) for name in NAMES]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Three shards of two tensors each."""
    tensors = {name: np.full((4, 8), i, np.float32) for i, name in enumerate(NAMES)}
    return write_shards(tmp_path / "model", [{name: tensors[name] for name in pair} for pair in ("ab", "cd", "ef")])


def test_whole_it_loads(shards: list[Path]) -> None:
    with open_checkpoint(shards[0].parent) as checkpoint:
        leaves = load_weights(checkpoint, SPECS, "float32", lambda spec, array: array, progress=False)
    assert [leaf[0, 0] for leaf in leaves] == list(range(6))


@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_deleted_shards(shards: list[Path], gone: list[int]) -> None:
    for i in gone:
        shards[i].unlink()
    with pytest.raises(CheckpointError, match=r"lacks .*the download is incomplete; fetch") as caught:
        open_checkpoint(shards[0].parent)
    for i, path in enumerate(shards):
        assert (path.name in str(caught.value)) == (i in gone)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_shard_cut_at_any_byte(shards: list[Path], which: int) -> None:
    content = shards[which].read_bytes()
    for length in range(len(content)):
        shards[which].write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"{shards[which].name} is cut off .*the download is incomplete"):
            open_checkpoint(shards[0].parent)
    shards[which].write_bytes(content)
    open_checkpoint(shards[0].parent).close()


def test_a_single_file_cut(tmp_path: Path) -> None:
    save_file({"a": np.ones((4, 8), np.float32)}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {})
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut off .*the download is incomplete"):
        open_checkpoint(tmp_path)


def test_a_shard_that_is_not_a_file(shards: list[Path]) -> None:
    shards[1].unlink()
    shards[1].symlink_to(shards[1].parent / "a-blob-that-never-came")
    with pytest.raises(CheckpointError, match=f"lacks {shards[1].name}"):
        open_checkpoint(shards[0].parent)


def test_a_shard_without_one_of_its_tensors(shards: list[Path]) -> None:
    rest = {name: array for name, array in load_file(shards[2]).items() if name != "f"}
    save_file(rest, shards[2])
    with pytest.raises(CheckpointError, match=rf"{shards[2].name} lacks tensor f, .*the download is incomplete"):
        open_checkpoint(shards[0].parent)


def test_an_index_that_forgets_a_shard(shards: list[Path]) -> None:
    weight_map = {name: shards[i // 2].name for i, name in enumerate(NAMES[:4])}
    write_json(shards[0].parent / "model.safetensors.index.json", {"weight_map": weight_map})
    with open_checkpoint(shards[0].parent) as checkpoint, pytest.raises(CheckpointError, match="lacks 2 tensors: e, f"):
        load_weights(checkpoint, SPECS, "float32", lambda spec, array: array, progress=False)
