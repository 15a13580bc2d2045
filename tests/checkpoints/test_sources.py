"""From names to files: paths, unknown names, and the hub's cache without a network."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_files import LLAMA_METADATA, write_gguf, write_json

from radix_jax.cache_dir import user_cache_dir
from radix_jax.checkpoints import CheckpointError, resolve, resolve_config


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {})
    assert resolve(str(file)) == file
    assert resolve(file) == file
    assert resolve(str(tmp_path)) == tmp_path


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {})
    assert resolve("~/m.gguf") == file


def test_a_folder_goes_before_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2-135m-instruct").mkdir()
    assert resolve("smollm2-135m-instruct") == Path("smollm2-135m-instruct")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a \.gguf file; give one, or the folder"):
        resolve(str(file))


@pytest.mark.parametrize(
    "name", ["smollm3", "", "nowhere/m.gguf", "./org/model", "a/b/c", "org/ model", "-x/y", "..//y"]
)
def test_an_unknown_name_lists_what_is_accepted(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"unknown model .*smollm2-135m-instruct.*org/model.*\.gguf file"):
        resolve(name)


def test_user_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("RADIX_JAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_dir() == Path("/home/someone/.cache/radix_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert user_cache_dir() == Path("/var/xdg/radix_jax")
    monkeypatch.setenv("RADIX_JAX_CACHE", "~/models")
    assert user_cache_dir() == Path("/home/someone/models")


RESOLVE = """
import sys
from radix_jax import checkpoints
from radix_jax.checkpoints import CheckpointError
assert "huggingface_hub" not in sys.modules, "to be imported only when a hub id is asked for"
for hub_id in sys.argv[2:]:
    try:
        print(getattr(checkpoints, sys.argv[1])(hub_id))
    except CheckpointError as error:
        print(error)
"""


def resolve_in_fresh_process(*hub_ids: str, function: str = "resolve", **environment: str) -> list[str]:
    """A line for each hub id, where huggingface_hub reads these variables, as it does once, when imported."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RESOLVE, function, *hub_ids],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def hub_cache(home: Path, hub_id: str) -> Path:
    """An empty snapshot of `hub_id` in a hub cache as huggingface_hub lays it out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return snapshot


def test_hub_ids_offline(tmp_path: Path) -> None:
    whole = hub_cache(tmp_path, "org/whole")
    write_json(whole / "config.json", {})
    save_file({"a": np.ones(2, np.float32)}, whole / "model.safetensors")
    one_gguf = hub_cache(tmp_path, "org/one-gguf")
    write_gguf(one_gguf / "m.gguf", LLAMA_METADATA, {})
    write_json(hub_cache(tmp_path, "org/no-weights") / "config.json", {})
    ids = ("org/whole", "org/one-gguf", "org/no-weights", "org/never-fetched")
    lines = resolve_in_fresh_process(*ids, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert lines[:2] == [str(whole), str(one_gguf)]
    for line, hub_id in zip(lines[2:], ids[2:], strict=True):
        assert f"hub id '{hub_id}' is not in the hub's cache and could not be fetched" in line
        assert "give the path" in line


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    whole = hub_cache(tmp_path, "org/whole")
    write_json(whole / "config.json", {})
    save_file({"a": np.ones(2, np.float32)}, whole / "model.safetensors")
    # Nothing listens there, so the connection is refused at once, with or without a network.
    environment = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    kept, missing = resolve_in_fresh_process("org/whole", "org/never-fetched", **environment)
    assert kept == str(whole)
    assert "hub id 'org/never-fetched' is not in the hub's cache and could not be fetched" in missing


def test_a_config_needs_no_weights(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    write_json(config, {})
    assert resolve_config(tmp_path) == config
    gguf = tmp_path / "m.gguf"
    write_gguf(gguf, LLAMA_METADATA, {})
    assert resolve_config(gguf) == gguf
    with pytest.raises(CheckpointError, match="unknown model 'no-such-model'"):
        resolve_config("no-such-model")


def test_configs_of_hub_ids_offline(tmp_path: Path) -> None:
    config = hub_cache(tmp_path, "org/no-weights") / "config.json"
    write_json(config, {})
    one_gguf = hub_cache(tmp_path, "org/one-gguf")
    write_gguf(one_gguf / "m.gguf", LLAMA_METADATA, {})
    ids = ("org/no-weights", "org/one-gguf", "org/never-fetched")
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    lines = resolve_in_fresh_process(*ids, function="resolve_config", **environment)
    assert lines[:2] == [str(config), str(one_gguf)]
    assert "hub id 'org/never-fetched' is not in the hub's cache and could not be fetched" in lines[2]
