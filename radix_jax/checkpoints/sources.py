"""From a name to files on this machine: a path, a built-in name, or an id on the Hugging Face hub."""

import os
import re
from pathlib import Path

from radix_jax.checkpoints.builtin import BUILTIN_MODELS, fetch_builtin
from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.checkpoints.hub import fetch_config_from_hub, fetch_from_hub

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve(name_or_path: str | Path) -> Path:
    """The folder or .gguf file that `name_or_path` stands for; fetched first if it isn't on this machine.

    What exists as a path is taken as a path; else a built-in name; else a hub id such as "org/model".

    Raises:
        CheckpointError: no such file, folder or name, or it cannot be fetched; says what is accepted.
    """
    name = str(name_or_path)
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is not a .gguf file; give one, or the folder that holds the safetensors")
        return path
    if name in BUILTIN_MODELS:
        return fetch_builtin(BUILTIN_MODELS[name])
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return fetch_from_hub(name)
    raise CheckpointError(
        f"unknown model {name!r}: no such file or folder, no built-in name ({', '.join(sorted(BUILTIN_MODELS))}), and "
        "not of the form org/model of a hub id; give a .gguf file, a folder with safetensors, or one of those names"
    )


def resolve_config(name_or_path: str | Path) -> Path:
    """The config.json of what `name_or_path` stands for, or its .gguf file; weights are fetched only with the latter.

    Raises:
        CheckpointError: as of resolve.
    """
    name = str(name_or_path)
    folder = Path(os.path.expanduser(name))
    if not folder.exists() and name not in BUILTIN_MODELS and _HUB_ID.fullmatch(name) and folder.suffix != ".gguf":
        folder = fetch_config_from_hub(name)
    config = folder / "config.json"
    return config if config.is_file() else resolve(name_or_path)
