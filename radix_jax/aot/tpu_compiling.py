"""Compile functions for a TPU that is not there.

Needs the package libtpu, which compiles on any CPU host. It reads its flags once a process, and ends the process over
some of what it does not like: each call compiles in a child.
"""

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from radix_jax.aot.tpu_bundles import Program
from radix_jax.aot.tpu_report import TpuKernel
from radix_jax.aot.tpu_targets import TpuTarget

_LIBTPU = "libtpu"
_CHILD = "radix_jax.aot.tpu_child"
_STDERR_CHARS = 3000


class TpuCompileError(RuntimeError):
    """Pallas, Mosaic or XLA refuse a program for a TPU, or end the process that compiles it."""


@dataclass(frozen=True)
class TpuJob:
    """One program to compile. fn: pickled by name, so of a module, or a functools.partial of such. args: pytrees of
    abstract arrays."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: int | Sequence[int] = ()
    compiler_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TpuProgram:
    """A program for a TPU.

    lower_s, compile_s: seconds. *_bytes: of the device's memory: arguments, results, what the program takes besides,
    and what of the results lies where an argument was. text: the compiled HLO, without the kernels' code. kernels,
    bundles: Mosaic's, and what each was made into, in the same order.
    """

    lower_s: float
    compile_s: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    text: str
    kernels: tuple[TpuKernel, ...]
    bundles: tuple[Program, ...] = field(repr=False)


def check_libtpu() -> None:
    """Raise ImportError, with what to install, unless libtpu is there."""
    if importlib.util.find_spec(_LIBTPU) is None:
        raise ImportError("libtpu is not installed; run: pip install 'radix_jax[aot-tpu]'")


def abstract_tree(tree: Any) -> Any:
    """`tree` with every array, or whatever has a shape and a dtype, as an abstract one."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def compile_for_tpu(
    target: TpuTarget,
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
) -> TpuProgram:
    """`fn` compiled for one device of `target`. args: pytrees of arrays or abstract arrays.

    Raises:
        ImportError: libtpu is not installed.
        TpuCompileError: it does not compile.
        TypeError: a function that can't be found by its name.
    """
    result = compile_all(target, [TpuJob(fn, args, donate_argnums, compiler_options)])[0]
    if isinstance(result, TpuCompileError):
        raise result
    return result


def compile_all(
    target: TpuTarget, jobs: Sequence[TpuJob], *, with_cycles: bool = False
) -> list[TpuProgram | TpuCompileError]:
    """Each job compiled for one device of `target`, or why it is not; all in one child, one after the other.

    Where a job ends the child, those behind it go on in another. with_cycles: ask libtpu for its estimate of the
    kernels' cycles, too, which ends the child over some copies, and over anything where the target has no estimate.
    The text then lacks the kernels' code and what VMEM they take.

    Raises:
        ImportError, TypeError: as `compile_for_tpu`.
    """
    check_libtpu()
    results: list[TpuProgram | TpuCompileError] = []
    while len(results) < len(jobs):
        done, log = _run_child(target, jobs[len(results) :], with_cycles=with_cycles)
        results += done
        if len(results) < len(jobs):
            results.append(TpuCompileError(f"the compiling process for {target.name} ended: {log[-_STDERR_CHARS:]}"))
    return results


def _run_child(
    target: TpuTarget, jobs: Sequence[TpuJob], *, with_cycles: bool
) -> tuple[list[TpuProgram | TpuCompileError], str]:
    """(what the child got done, what it wrote on stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        asked, given, dump = (Path(folder) / name for name in ("jobs", "results", "dump"))
        dump.mkdir()
        asked.write_bytes(_pickled(target, jobs))
        command = [sys.executable, "-m", _CHILD, str(asked), str(given), str(dump)]
        done = subprocess.run(
            command, env=_environment(dump, with_cycles=with_cycles), capture_output=True, text=True, check=False
        )
        return _read_results(given), done.stderr


def _pickled(target: TpuTarget, jobs: Sequence[TpuJob]) -> bytes:
    plain = [(job.fn, abstract_tree(job.args), job.donate_argnums, dict(job.compiler_options)) for job in jobs]
    try:
        return pickle.dumps((target, plain))
    except (AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"a program for a TPU is compiled in another process and found there by its name, which fails: {error}; "
            "give a function of a module, or a functools.partial of one"
        ) from error


def _environment(dump: Path, *, with_cycles: bool) -> dict[str, str]:
    flags = [f"--xla_jf_dump_to={dump}", "--xla_jf_dump_llo_text=true", "--xla_jf_dump_llo_pass_label_regex=final_"]
    if with_cycles:
        flags.append(f"--xla_jf_dump_static_llo_profile_to={dump}")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": " ".join(flags),
        # Without a TPU it asks the metadata server of a cloud for one, and would lock a device against other compiles.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _read_results(path: Path) -> list[TpuProgram | TpuCompileError]:
    results: list[TpuProgram | TpuCompileError] = []
    if not path.exists():
        return results
    with path.open("rb") as file:
        while True:
            try:
                result = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return results
            results.append(TpuCompileError(result) if isinstance(result, str) else result)
