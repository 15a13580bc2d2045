"""From a checkpoint to the leaves of a model: one tensor at a time, straight to the dtype asked for."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes bfloat16 a name that numpy knows)
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from radix_jax.arrays import WeightSpec
from radix_jax.checkpoints.checkpoint import Checkpoint
from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.checkpoints.gguf import open_gguf
from radix_jax.checkpoints.safetensors import open_safetensors

# Tensors that a file may hold beside the weights: tables that the model computes, or reads from hf_config.
_HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight", "attn_rot_embd.weight")
_NAMES_IN_MESSAGE = 5


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file, a folder of safetensors, or a folder that holds one .gguf file.

    Raises:
        CheckpointError: there is no checkpoint, more than one, or a damaged one; names the file.
        GGUFError: a damaged or cut off GGUF file.
    """
    path = Path(path)
    if path.is_file():
        return open_gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; give a .gguf file or a folder with config.json and safetensors")
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return open_safetensors(path)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return open_gguf(gguf_files[0])
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise CheckpointError(f"{path} holds {len(gguf_files)} GGUF files ({names}); give the path of one of them")
    raise CheckpointError(f"{path} holds neither safetensors nor a .gguf file: not a checkpoint, or not fully fetched")


def load_weights(
    checkpoint: Checkpoint,
    specs: Sequence[WeightSpec],
    dtype: str,
    put: Callable[[WeightSpec, np.ndarray], Any],
    progress: bool = True,
) -> list[Any]:
    """Read, dequantise, un-permute, transpose and convert each tensor, and hand it to `put`.

    No more than one tensor is held beside what `put` keeps, and only a piece of it in another type than `dtype`.
    `put` may keep the array: it is not written again.

    Args:
        dtype: of the arrays, a name that numpy or ml_dtypes knows, e.g. "float32", "bfloat16".
        progress: draw a progress bar on stderr.

    Returns:
        What `put` returned for each spec, in order; None for an optional tensor that the checkpoint lacks.

    Raises:
        CheckpointError: tensors are missing, left over or of the wrong shape (before any is read), or of a type that
            cannot be read; names file and tensor.
    """
    names = [spec.gguf_name if checkpoint.format == "gguf" else spec.hf_name for spec in specs]
    _check(checkpoint, specs, names)
    target = np.dtype(dtype)
    present = [name for name in names if name in checkpoint.tensors]
    total_bytes = sum(math.prod(checkpoint.tensors[name].shape) for name in present) * target.itemsize
    leaves: list[Any] = []
    with _bar(progress) as bar:
        task = bar.add_task(f"loading {checkpoint.path.name}", total=total_bytes)
        for spec, name in zip(specs, names, strict=True):
            if name not in checkpoint.tensors:
                leaves.append(None)
                continue
            array = _read(checkpoint, spec, name, target)
            leaves.append(put(spec, array))
            bar.advance(task, array.nbytes)
    return leaves


def _bar(progress: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, force_jupyter=False),  # a notebook would need widgets for it
        disable=not progress,
    )


def _read(checkpoint: Checkpoint, spec: WeightSpec, name: str, target: np.dtype) -> np.ndarray:
    """One tensor as the model wants it, filled piece by piece."""
    permuted = checkpoint.format == "gguf" and spec.gguf_rope_heads > 0
    rows = _rows_of_gguf_rope(spec.shape[0], spec.gguf_rope_heads) if permuted else None
    leaf = np.empty(spec.shape[::-1] if spec.transpose else spec.shape, target)
    stored_view = leaf.T if spec.transpose else leaf
    start = 0
    for piece in checkpoint.read_pieces(name):
        if not spec.shape:
            stored_view[...] = piece
            continue
        stop = start + len(piece)
        stored_view[slice(start, stop) if rows is None else rows[start:stop]] = piece
        start = stop
    return leaf


def _rows_of_gguf_rope(num_rows: int, num_heads: int) -> np.ndarray:
    """For each row of a q or k matrix as GGUF stores it, its row in the usual order.

    GGUF interleaves the two halves of each head (row 2j + s holds row s * head_dim/2 + j), as its rope rotates
    neighbours; the usual rope rotates halves.
    """
    head_dim = num_rows // num_heads
    usual = np.arange(num_rows).reshape(num_heads, 2, head_dim // 2)
    return usual.swapaxes(1, 2).reshape(num_rows)


def _check(checkpoint: Checkpoint, specs: Sequence[WeightSpec], names: Sequence[str]) -> None:
    """Compare what the model wants with what the checkpoint holds, before anything is read."""
    tensors = checkpoint.tensors
    missing = [name for spec, name in zip(specs, names, strict=True) if name not in tensors and not spec.optional]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {_listed(missing)}: "
            "the download is incomplete, or the weights are of another model than the configuration"
        )
    extra = sorted(set(tensors) - set(names))
    extra = [name for name in extra if not name.endswith(_HARMLESS_SUFFIXES)]
    if extra:
        raise CheckpointError(
            f"{tensors[extra[0]].file} holds {_listed(extra)}, which the model has no place for: "
            "the weights are of another model than the configuration"
        )
    for spec, name in zip(specs, names, strict=True):
        if name in tensors and tensors[name].shape != spec.shape:
            raise CheckpointError(
                f"{tensors[name].file}: tensor {name} has shape {tensors[name].shape}, "
                f"the model's configuration asks for {spec.shape}"
            )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_IN_MESSAGE])
    more = len(names) - _NAMES_IN_MESSAGE
    what = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{what} {shown}" + (f" and {more} more" if more > 0 else "")
