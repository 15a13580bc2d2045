"""Checkpoints: from a name to files, and from files to the leaves of a model."""

from radix_jax.checkpoints.builtin import BUILTIN_MODELS
from radix_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.checkpoints.loading import load_weights, open_checkpoint
from radix_jax.checkpoints.sources import resolve, resolve_config

__all__ = [
    "BUILTIN_MODELS",
    "Checkpoint",
    "CheckpointError",
    "TensorInfo",
    "load_weights",
    "open_checkpoint",
    "resolve",
    "resolve_config",
]
