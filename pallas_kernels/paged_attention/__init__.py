"""Paged attention: attend over, write into, and copy inside, the flat page pool."""

from radix_jax.pallas_kernels.paged_attention.api import attention_backend, paged_attention
from radix_jax.pallas_kernels.paged_attention.write import copy_pages, write_kv

__all__ = ["attention_backend", "copy_pages", "paged_attention", "write_kv"]
