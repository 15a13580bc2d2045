"""Paged attention on a TPU, by Pallas Mosaic kernels."""
