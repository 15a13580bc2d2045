"""Compile a function for a GPU that is not there.

Needs the `aot` extra (jax's CUDA plugin and CUDA's compilers, from PyPI), and jax on the CPU: JAX_PLATFORMS=cpu.
"""

import contextlib
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from radix_jax.aot.kernel_report import KernelReport, read_reports
from radix_jax.aot.targets import Target
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import lowering_for

_PLUGIN = "jax-cuda13-plugin"


@dataclass(frozen=True)
class CompiledProgram:
    """A program for a target.

    executable: of jax; it can't run here. lower_s, compile_s: seconds. kernels: one report a kernel of PTX.
    """

    executable: Any
    lower_s: float
    compile_s: float
    kernels: tuple[KernelReport, ...]

    @property
    def temp_bytes(self) -> int:
        """Of the device's memory, what the program takes beside its arguments and results."""
        return self.executable.memory_analysis().temp_size_in_bytes

    @property
    def alias_bytes(self) -> int:
        """Of the results, what lies where an argument was."""
        return self.executable.memory_analysis().alias_size_in_bytes


def use_cpu() -> None:
    """Set up a process of its own for compiles: before jax first looks for devices."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def check_installed() -> None:
    """Raise ImportError, with what to install, unless jax's CUDA plugin is there, and of jaxlib's version.

    jax warns of a plugin of another version and then crashes.
    """
    try:
        version = importlib.metadata.version(_PLUGIN)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{_PLUGIN} is not installed; run: pip install 'radix_jax[aot]'") from error
    wanted = importlib.metadata.version("jaxlib")
    if version != wanted:
        raise ImportError(f"{_PLUGIN} is {version} and jaxlib {wanted}; run: pip install '{_PLUGIN}=={wanted}'")


def abstract(target: Target, tree: Any) -> Any:
    """`tree` with every array, or whatever has a shape and a dtype, as an abstract one on the target."""
    sharding = SingleDeviceSharding(_device(target))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def compile_for(
    target: Target,
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
) -> CompiledProgram:
    """`fn` compiled for `target`. args: pytrees of arrays or abstract arrays. compiler_options: XLA's.

    Raises:
        ImportError: the `aot` extra is not installed.
    """
    abstract_args = abstract(target, args)
    start = time.perf_counter()
    with lowering_for(target.block_names), _abstract_device(target):
        traced = jax.jit(fn, donate_argnums=donate_argnums).trace(*abstract_args)
        lowered = traced.lower(lowering_platforms=("cuda",))
    lowered_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        executable = lowered.compile(compiler_options=dict(compiler_options) | dump)
        compiled_at = time.perf_counter()
        kernels = read_reports(Path(folder), target.architecture)
    return CompiledProgram(executable, lowered_at - start, compiled_at - lowered_at, kernels)


def _device(target: Target) -> Any:
    check_installed()
    # The plugin looks for a driver otherwise, and there is none.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=target.description()
    )
    return topology.devices[0]


@contextlib.contextmanager
def _abstract_device(target: Target) -> Iterator[None]:
    """From jax 0.11 on, Pallas asks the abstract mesh which GPU it lowers for."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    device = jax.sharding.AbstractDevice(  # pyright: ignore[reportAttributeAccessIssue]
        device_kind=target.device_kind, num_cores=None, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)  # pyright: ignore[reportCallIssue]
    with jax.sharding.use_abstract_mesh(mesh):  # pyright: ignore[reportAttributeAccessIssue]
        yield
