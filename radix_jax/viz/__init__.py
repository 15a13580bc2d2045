"""Drawings of a TreeSnapshot; knows nothing of trees or tokenizers."""

from radix_jax.viz.notebook import TreeView
from radix_jax.viz.replay import Frame, Replay
from radix_jax.viz.snapshot import NodeSnapshot, NodeState, PoolSnapshot, TailSnapshot, TreeSnapshot
from radix_jax.viz.svg import render_svg
from radix_jax.viz.text import render_text

__all__ = [
    "Frame",
    "NodeSnapshot",
    "NodeState",
    "PoolSnapshot",
    "Replay",
    "TailSnapshot",
    "TreeSnapshot",
    "TreeView",
    "render_svg",
    "render_text",
]
