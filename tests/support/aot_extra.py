"""Skips what compiles for a GPU where its compilers are not installed; `make test-slow` and `make test-aot` do."""

import importlib.metadata

import pytest


def needs_compilers() -> pytest.MarkDecorator:
    """Marks tests that compile for a GPU that is not there."""
    try:
        importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        return pytest.mark.skip(reason="the aot extra is not installed: pip install 'radix_jax[aot]'")
    return pytest.mark.usefixtures()
