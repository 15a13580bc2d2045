"""The one entry to paged attention: checks the call, then runs the implementation that was chosen."""

import jax
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.attention_backends import AttentionFn
from radix_jax.pallas_kernels.paged_attention.backends import attention_backend, attention_fn, call_attention_fn
from radix_jax.pallas_kernels.paged_attention.checks import check_attention


def paged_attention(
    q: Float[jax.Array, "T N H"],
    kv_pages: KVPool,
    page_table: Int32[jax.Array, "B P"],
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    return_lse: bool = False,
    num_kv_heads: int | None = None,
    kv_scales: Float32[jax.Array, "G 2"] | None = None,
    max_q_len: int | None = None,
    backend: str | AttentionFn = "auto",
) -> Float[jax.Array, "T N H"] | tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"]]:
    """Causal attention of ragged rows over their pages, the rows' own new tokens (already written) included.

    Row b's queries [cu_q_lens[b], cu_q_lens[b + 1]) are the last tokens of its kv_lens[b]; its token s lies in page
    `page_table[b, s // K] + page_offset` of the pool, at offset s % K. Lanes of a token: K of head g in
    [2gH, (2g + 1)H), its V in [(2g + 1)H, (2g + 2)H); lanes from 2GH on are padding. q head n reads kv head
    n // (N // G). What no row wrote may hold anything, NaN too: slots behind a row's end, the null page, other layers.

    page_offset: layer * pages of a layer. scale: of the scores. max_q_len: bounds the queries of one row; None: T; 1 is
    a decode step. num_kv_heads: G; None: W / 2H, which is wrong where W is rounded up.
    sliding_window: a query at position p sees positions (p - sliding_window, p]; None: all up to p.
    logit_soft_cap: c, makes the scaled scores s into c * tanh(s / c); None: leaves them (Gemma 2, section 2).
    kv_scales: what K ([:, 0]) and V ([:, 1]) of each kv head were divided by when they were written; None: 1. Meant for
    a float8 pool, right for any.
    return_lse: gives (out, lse) with lse the natural log of the sum of exp of the scores that a token sees.

    out has q's dtype; scores and sums are float32. Tokens that belong to no row come out finite and otherwise
    undefined, with lse -inf; rows of kv_len 0 are padding.

    q is float32, bfloat16 or float16; the pool too, or float8_e4m3fn or float8_e5m2. backend: see `attention_backend`;
    "auto" is what suits the first device of this process. Softmax attention is Vaswani et al. 2017, eq. 1.

    Raises:
        ValueError: arrays that don't fit each other or have no element, a setting out of its range, an unknown backend,
            a backend that gives something else.
        TypeError: a dtype that is none of those above.
        NotImplementedError: a backend that is not built yet, or (UnsupportedOption) lacks an option that is given.
    """
    num_kv_heads, max_q_len = check_attention(
        q,
        kv_pages,
        page_table,
        kv_lens,
        cu_q_lens,
        page_offset=page_offset,
        scale=scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        num_kv_heads=num_kv_heads,
        kv_scales=kv_scales,
        max_q_len=max_q_len,
    )
    if isinstance(backend, str):
        name = attention_backend()[0] if backend == "auto" else backend
        fn = attention_fn(name)
    else:
        name, fn = getattr(backend, "__name__", type(backend).__name__), backend
    keywords = {
        "page_offset": page_offset,
        "scale": float(scale),
        "sliding_window": None if sliding_window is None else int(sliding_window),
        "logit_soft_cap": None if logit_soft_cap is None else float(logit_soft_cap),
        "return_lse": return_lse,
        "num_kv_heads": num_kv_heads,
        "kv_scales": kv_scales,
        "max_q_len": max_q_len,
    }
    return call_attention_fn(name, fn, (q, kv_pages, page_table, kv_lens, cu_q_lens), keywords)
