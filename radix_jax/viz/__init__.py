"""Drawings of a TreeSnapshot; knows nothing of trees or tokenizers."""

from radix_jax.viz.snapshot import NodeSnapshot, NodeState, TreeSnapshot
from radix_jax.viz.text import render_text

__all__ = ["NodeSnapshot", "NodeState", "TreeSnapshot", "render_text"]
