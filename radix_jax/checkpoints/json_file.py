"""Reading the small JSON files beside the weights."""

import json
from pathlib import Path
from typing import Any

from radix_jax.checkpoints.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: it is missing, damaged, or holds something else than an object; names the file.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the download is incomplete; fetch the folder again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}): the download is incomplete or damaged; fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As read_json, but a file that isn't there is an empty object."""
    return read_json(path) if path.is_file() else {}
