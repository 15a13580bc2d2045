"""Skips what compiles for a GPU where its compilers are not installed; `make test-slow` and `test-aot` install them."""

import importlib.util

import pytest


def needs_compilers() -> pytest.MarkDecorator:
    """Marks tests that compile for a GPU that is not there."""
    missing = importlib.util.find_spec("jax_cuda13_plugin") is None
    return pytest.mark.skipif(missing, reason="the aot extra is not installed: pip install 'radix_jax[aot]'")
