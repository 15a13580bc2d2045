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
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    return_lse: bool = False,
    num_kv_heads: int | None = None,
    kv_scales: Float[np.ndarray, "G 2"] | None = None,
) -> Float[np.ndarray, "T N H"] | tuple[Float[np.ndarray, "T N H"], Float[np.ndarray, "T N"]]:
    """Causal softmax attention (Vaswani et al. 2017, eq. 1) of each row's queries over the row's own pages.

    The arguments are those of `paged_attention`. Computed in the dtype of `q`; tokens of no row come out as 0, and -inf
    for their log sum.
    """
    num_heads, head_dim = q.shape[1:]
    kv_heads = num_kv_heads or kv_pages.shape[-1] // (2 * head_dim)
    scales = np.ones((kv_heads, 2), q.dtype) if kv_scales is None else kv_scales.astype(q.dtype)
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf, q.dtype)
    for row, kv_len in enumerate(kv_lens):
        first, last = cu_q_lens[row], cu_q_lens[row + 1]
        pages = page_table[row, : -(-kv_len // kv_pages.shape[1])] + page_offset
        lanes = kv_pages[pages].reshape(-1, kv_pages.shape[-1])[:kv_len]
        tokens = lanes[:, : 2 * kv_heads * head_dim].astype(q.dtype).reshape(-1, kv_heads, 2, head_dim)
        tokens = tokens * scales[:, :, None]
        for t in range(first, last):
            end = kv_len - (last - 1 - t)
            start = 0 if sliding_window is None else max(0, end - sliding_window)
            for head in range(num_heads):
                k, v = tokens[start:end, head * kv_heads // num_heads].swapaxes(0, 1)
                scores = k @ q[t, head] * q.dtype.type(scale)
                if logit_soft_cap is not None:
                    scores = logit_soft_cap * np.tanh(scores / logit_soft_cap)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights @ v / weights.sum()
                lse[t, head] = scores.max() + np.log(weights.sum())
    return (out, lse) if return_lse else out
