"""Attention kernels over the page pool, one folder a kernel."""

from radix_jax.pallas_kernels.paged_attention import (
    attention_backend,
    copy_pages,
    paged_attention,
    pool_width,
    register_attention_backend,
    write_and_attend,
    write_kv,
)

__all__ = [
    "attention_backend",
    "copy_pages",
    "paged_attention",
    "pool_width",
    "register_attention_backend",
    "write_and_attend",
    "write_kv",
]
