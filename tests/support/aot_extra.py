"""Skips what compiles for accelerators that are not there where their compilers are not installed; `make test-slow` and
`test-aot` install them."""

import importlib.util

import pytest


def needs_compilers() -> pytest.MarkDecorator:
    """Marks tests that compile for a GPU that is not there."""
    missing = importlib.util.find_spec("jax_cuda13_plugin") is None
    return pytest.mark.skipif(missing, reason="the aot extra is not installed: pip install 'radix_jax[aot]'")


def needs_libtpu() -> pytest.MarkDecorator:
    """Marks tests that compile for a TPU that is not there."""
    missing = importlib.util.find_spec("libtpu") is None
    return pytest.mark.skipif(missing, reason="libtpu is not installed: pip install 'radix_jax[aot-tpu]'")
