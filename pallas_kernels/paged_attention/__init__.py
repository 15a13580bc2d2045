"""Paged attention: attend over, write into, copy inside, and carry pages out of and into, the flat page pool."""

from radix_jax.attention_backends import register_attention_backend
from radix_jax.pallas_kernels.paged_attention.api import paged_attention
from radix_jax.pallas_kernels.paged_attention.backends import attention_backend, pool_width
from radix_jax.pallas_kernels.paged_attention.write import copy_pages, read_pages, write_kv, write_pages
from radix_jax.pallas_kernels.paged_attention.write_and_attend import write_and_attend

__all__ = [
    "attention_backend",
    "copy_pages",
    "paged_attention",
    "pool_width",
    "read_pages",
    "register_attention_backend",
    "write_and_attend",
    "write_kv",
    "write_pages",
]
