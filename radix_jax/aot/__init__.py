"""Compile steps for accelerators that are not there, and read from the result what they will cost."""
