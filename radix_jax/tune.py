"""Measure the kernels' block choices on the chip that is present."""
