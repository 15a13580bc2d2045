"""Installing leaves a platform's jax and numpy alone, and says so where they are too old."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from radix_jax.jax_version import MIN_JAX, check_jax_version

ROOT = Path(__file__).parent.parent.parent
PLATFORM_PACKAGES = ("jax", "jaxlib", "numpy")


@pytest.mark.slow
def test_installing_the_base_changes_no_platform_package() -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    names = {entry["metadata"]["name"].lower() for entry in json.loads(done.stdout)["install"]}
    assert "radix_jax" in names
    assert not names & set(PLATFORM_PACKAGES)
    assert not {name for name in names if name.startswith(("jax-cuda", "nvidia-", "libtpu", "torch"))}


def test_installed_jax_is_new_enough() -> None:
    check_jax_version()


def test_floor_is_the_one_of_the_package() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floor = ".".join(map(str, MIN_JAX))
    assert {f"jax>={floor}", f"jaxlib>={floor}"} <= set(dependencies)


def run_with_package(folder: Path, package: str, version: str, statement: str) -> subprocess.CompletedProcess[str]:
    """Run `statement` where `package` seems to be installed in `version`; nothing of it can be imported."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("raise RuntimeError('too old to be imported')\n")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("name", "package", "version"),
    [("LLM", "jax", "0.4.30"), ("Engine", "jax", "0.10.1"), ("Engine", "jaxlib", "0.9")],
)
def test_too_old_jax_is_a_clear_message(name: str, package: str, version: str, tmp_path: Path) -> None:
    done = run_with_package(tmp_path, package, version, f"from radix_jax import {name}")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith(f"ImportError: radix_jax needs {package} 0.10.2 or newer, and {version} is installed")
    assert "pip install" in message


def test_suffixes_of_newer_versions_are_understood(tmp_path: Path) -> None:
    statement = "from radix_jax.jax_version import check_jax_version\ncheck_jax_version()"
    for version in ("0.10.2", "0.11.0.dev20260101", "1.0rc1"):
        done = run_with_package(tmp_path / version, "jax", version, statement)
        assert done.returncode == 0, done.stderr
