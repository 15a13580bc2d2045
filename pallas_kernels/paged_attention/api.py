"""The one entry to paged attention: checks shapes, picks an implementation, and can say which and why."""

import jax
from jaxtyping import Float, Int32

from radix_jax.arrays import KVPool
from radix_jax.pallas_kernels.paged_attention.xla import paged_attention_xla


def attention_backend(requested: str = "auto") -> tuple[str, str]:
    """(backend, reason): the implementation that `requested` stands for on this platform.

    Raises:
        NotImplementedError: a backend that is not built yet.
    """
    if requested == "xla":
        return "xla", "asked for"
    if requested == "auto":
        return "xla", f"no kernel of ours is built for {jax.default_backend()} yet"
    raise NotImplementedError(f"attention_backend={requested!r} is not built yet; use auto or xla")


def paged_attention(
    q: Float[jax.Array, "T N H"],
    kv_pages: KVPool,
    page_table: Int32[jax.Array, "B P"],
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    *,
    page_offset: int,
    scale: float,
    max_q_len: int,
    backend: str = "auto",
) -> Float[jax.Array, "T N H"]:
    """Causal attention of ragged rows over their pages, the rows' own new tokens (already written) included.

    Row b's queries [cu_q_lens[b], cu_q_lens[b + 1]) are the last tokens of its kv_lens[b]; its token s lies in page
    `page_table[b, s // K] + page_offset` of the pool, at offset s % K. Tokens that belong to no row come out finite and
    otherwise undefined; rows of kv_len 0 are padding. `max_q_len` bounds the queries of one row; 1 is a decode step.

    Softmax attention is Vaswani et al. 2017, eq. 1; the blockwise form is Milakov and Gimelshein 2018, algorithm 3.

    Raises:
        ValueError: shapes that don't fit each other.
        NotImplementedError: a backend that is not built yet.
    """
    num_heads, head_dim = q.shape[1:]
    width = kv_pages.shape[-1]
    num_kv_heads = width // (2 * head_dim)
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} q heads of {head_dim} can't share pool lanes of width {width}")
    if cu_q_lens.shape[0] != page_table.shape[0] + 1 or kv_lens.shape[0] != page_table.shape[0]:
        raise ValueError(
            f"page_table has {page_table.shape[0]} rows, kv_lens {kv_lens.shape[0]} and cu_q_lens "
            f"{cu_q_lens.shape[0]}; they must be B, B and B + 1"
        )
    if not 1 <= max_q_len <= q.shape[0]:
        raise ValueError(f"max_q_len={max_q_len} is outside [1, {q.shape[0]}], the tokens of the step")
    attention_backend(backend)
    return paged_attention_xla(
        q,
        kv_pages,
        page_table,
        kv_lens,
        cu_q_lens,
        page_offset=page_offset,
        scale=scale,
        max_q_len=max_q_len,
        sequential=jax.default_backend() == "cpu",
    )
