"""Paged attention in plain numpy, one query head at a time: the oracle of every other form."""

import numpy as np
from jaxtyping import Float, Int32


def paged_attention_reference(
    q: Float[np.ndarray, "T N H"],
    kv_pages: Float[np.ndarray, "LP K W"],
    page_table: Int32[np.ndarray, "B P"],
    kv_lens: Int32[np.ndarray, " B"],
    cu_q_lens: Int32[np.ndarray, " B_plus_1"],
    *,
    page_offset: int,
    scale: float,
) -> Float[np.ndarray, "T N H"]:
    """Causal softmax attention (Vaswani et al. 2017, eq. 1) of each row's queries over the row's own pages.

    Row b holds queries [cu_q_lens[b], cu_q_lens[b + 1]); they are the last tokens of its kv_lens[b]. Computed in the
    dtype of `q`; tokens of no row come out as 0.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_pages.shape[-1] // (2 * head_dim)
    out = np.zeros_like(q)
    for row, kv_len in enumerate(kv_lens):
        first, last = cu_q_lens[row], cu_q_lens[row + 1]
        tokens = kv_pages[page_table[row] + page_offset].reshape(-1, num_kv_heads, 2, head_dim)[:kv_len]
        for t in range(first, last):
            visible = kv_len - (last - 1 - t)
            for head in range(num_heads):
                k, v = tokens[:visible, head * num_kv_heads // num_heads].astype(q.dtype).swapaxes(0, 1)
                scores = k @ q[t, head] * q.dtype.type(scale)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights @ v / weights.sum()
    return out
