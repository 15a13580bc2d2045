"""Paged attention: attend over, and write into, the flat page pool."""

from radix_jax.pallas_kernels.paged_attention.api import attention_backend, paged_attention
from radix_jax.pallas_kernels.paged_attention.write import write_kv

__all__ = ["attention_backend", "paged_attention", "write_kv"]
