"""What a layer of a model does with the pool: write the K and V of its new tokens, then attend."""

from typing import Any

import jax
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.attention_backends import AttentionFn
from radix_jax.pallas_kernels.paged_attention.api import paged_attention
from radix_jax.pallas_kernels.paged_attention.backends import TPU_BACKENDS, attention_backend, tpu_interpretation
from radix_jax.pallas_kernels.paged_attention.checks import check_attention, check_write
from radix_jax.pallas_kernels.paged_attention.write import write_kv


def write_and_attend(
    q: Float[jax.Array, "T N H"],
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    kv_pages: KVPool,
    page_table: Int32[jax.Array, "B P"],
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    *,
    write_slots: Int32[jax.Array, " T"],
    page_offset: int | Int32[jax.Array, ""],
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    num_kv_heads: int | None = None,
    kv_scales: Float32[jax.Array, "G 2"] | None = None,
    max_q_len: int | None = None,
    backend: str | AttentionFn = "auto",
) -> tuple[KVPool, Float[jax.Array, "T N H"]]:
    """(the pool after `write_kv`, what `paged_attention` gives over it); arguments and errors are theirs.

    write_slots: of each token, the slot that the page table gives for its place in its row. One kernel does both where
    a TPU decodes.
    """
    name = attention_backend()[0] if backend == "auto" else backend
    if name in TPU_BACKENDS:
        return _on_tpu(
            q,
            k,
            v,
            kv_pages,
            (page_table, kv_lens, cu_q_lens),
            write_slots,
            page_offset=page_offset,
            scale=scale,
            sliding_window=sliding_window,
            logit_soft_cap=logit_soft_cap,
            num_kv_heads=num_kv_heads,
            kv_scales=kv_scales,
            max_q_len=max_q_len,
            interpret=tpu_interpretation(name),
        )
    kv_pages = write_kv(kv_pages, k, v, write_slots, page_offset=page_offset, kv_scales=kv_scales, backend=backend)
    out = paged_attention(
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
        backend=backend,
    )
    assert isinstance(out, jax.Array), "without return_lse it is one array"
    return kv_pages, out


def _on_tpu(
    q: Float[jax.Array, "T N H"],
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    kv_pages: KVPool,
    rows: tuple[Int32[jax.Array, "B P"], Int32[jax.Array, " B"], Int32[jax.Array, " B_plus_1"]],
    write_slots: Int32[jax.Array, " T"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    num_kv_heads: int | None,
    kv_scales: Float32[jax.Array, "G 2"] | None,
    max_q_len: int | None,
    interpret: Any,
) -> tuple[KVPool, Float[jax.Array, "T N H"]]:
    from radix_jax.pallas_kernels.paged_attention.tpu import attend_and_write_tpu

    check_write(kv_pages, k, v, write_slots, page_offset=page_offset, kv_scales=kv_scales)
    _, max_q_len = check_attention(
        q,
        kv_pages,
        *rows,
        page_offset=page_offset,
        scale=scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        num_kv_heads=num_kv_heads,
        kv_scales=kv_scales,
        max_q_len=max_q_len,
    )
    out, kv_pages = attend_and_write_tpu(
        q,
        k,
        v,
        kv_pages,
        *rows,
        write_slots,
        page_offset=page_offset,
        scale=scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        kv_scales=kv_scales,
        max_q_len=max_q_len,
        interpret=interpret,
    )
    return kv_pages, out
