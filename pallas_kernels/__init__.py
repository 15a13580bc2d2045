"""Attention kernels over the page pool, one folder a kernel."""
