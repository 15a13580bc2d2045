"""What compiles for a GPU need, and what is said where it is missing; a compile of something small."""

import importlib.metadata

import jax
import jax.numpy as jnp
import pytest
from aot_extra import needs_compilers

from radix_jax.aot import kernel_report
from radix_jax.aot.compiling import check_installed, compile_for
from radix_jax.aot.kernel_report import find_ptxas, run_ptxas
from radix_jax.aot.targets import target_of, targets


def test_a_missing_plugin_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"jax-cuda13-plugin is not installed; run: pip install 'radix_jax\[aot\]'"):
        check_installed()


def test_a_plugin_of_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.11.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    with pytest.raises(ImportError, match=r"jaxlib 0\.10\.2; run: pip install 'jax-cuda13-plugin==0\.10\.2'"):
        check_installed()


def test_a_missing_ptxas_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_report.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ImportError, match=r"ptxas is not installed; run: pip install 'radix_jax\[aot\]'"):
        find_ptxas()


@pytest.mark.slow
@needs_compilers()
def test_ptx_that_is_none_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Missing \.version directive"):
        run_ptxas("add some numbers", "sm_90a")


@pytest.mark.slow
@needs_compilers()
@pytest.mark.parametrize("name", targets())
def test_a_matmul_for_every_target(name: str) -> None:
    """XLA's own kernels are seen too, and what is given away is."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    program = compile_for(target_of(name), lambda x, y: x + jnp.exp(x @ y), x, x, donate_argnums=0)
    memory = program.executable.memory_analysis()
    assert memory.alias_size_in_bytes == memory.output_size_in_bytes == x.size * 2
    assert sum(kernel.tensor_core_instructions for kernel in program.kernels) > 0
    for kernel in program.kernels:
        assert 0 < kernel.registers <= 255
        assert kernel.num_launches > 0
        assert kernel.shared_bytes <= target_of(name).shared_bytes_per_kernel
