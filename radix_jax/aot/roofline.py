"""What a step has to move and to compute, counted from the model's config, and how long a device needs for it at least.

The roofline model (Williams et al. 2009): a step takes at least bytes / bandwidth, and at least operations / peak. XLA
can't count inside the attention kernels, so this does not ask it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from radix_jax.aot.devices import AnyTarget
from radix_jax.functional import kv_width
from radix_jax.models.base import ModelParams


@dataclass(frozen=True)
class StepWork:
    """The least that a step moves and computes.

    weights_bytes: read once. kv_bytes: K and V read and written. matmul_flop, attention_flop: multiply-adds count 2.
    dtype_bytes: of the matmuls' elements.
    """

    weights_bytes: int
    kv_bytes: int
    matmul_flop: int
    attention_flop: int
    dtype_bytes: int

    def seconds(self, target: AnyTarget) -> tuple[float, str]:
        """(least seconds on the target, what binds: "bandwidth" or "compute")."""
        moving_s = (self.weights_bytes + self.kv_bytes) / target.bandwidth_bytes_per_s
        computing_s = (self.matmul_flop + self.attention_flop) / target.flop_per_s(self.dtype_bytes)
        return max((moving_s, "bandwidth"), (computing_s, "compute"))


def tree_bytes(tree: Any) -> int:
    """Bytes of all (abstract) arrays of a pytree."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def page_bytes(config: Any, page_size: int, kv_dtype: str, attention_backend: str) -> int:
    """Bytes of one page in all layers, in the pool of a backend: a name other than "auto"."""
    return config.num_layers * page_size * kv_width(config, attention_backend) * np.dtype(kv_dtype).itemsize


def step_work(params: ModelParams, *, num_rows: int, q_len: int, context_len: int, kv_token_bytes: int) -> StepWork:
    """The work of `num_rows` rows that each compute `q_len` tokens, the last of `context_len`; one logit row a row.

    kv_token_bytes: of the pool, `page_bytes` of a page of one token.
    """
    config = params.config
    num_tokens = num_rows * q_len
    embed = params.weights["embed"]
    # Of an embedding that is not the head a step reads a few rows.
    read = {name: part for name, part in params.weights.items() if name != "embed" or config.tie_word_embeddings}
    num_head = int(np.prod(embed.shape))
    num_read = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(read))
    # Query i of a row sees context_len - q_len + 1 + i tokens.
    num_seen = num_rows * (q_len * (context_len - q_len) + q_len * (q_len + 1) // 2)
    return StepWork(
        weights_bytes=tree_bytes(read),
        kv_bytes=(num_rows * context_len + num_tokens) * kv_token_bytes,
        matmul_flop=2 * ((num_read - num_head) * num_tokens + num_head * num_rows),
        attention_flop=4 * num_seen * config.num_layers * config.num_heads * config.head_dim,
        dtype_bytes=embed.dtype.itemsize,
    )
