"""Ragged rows over a page pool in which all that no row has written is NaN or infinite."""

from radix_jax.pallas_kernels.paged_attention.oracle_grid import NUM_LAYERS, PagedRows, poisoned_rows

__all__ = ["NUM_LAYERS", "PagedRows", "poisoned_rows"]
