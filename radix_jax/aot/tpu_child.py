"""The process that compiles for a TPU: python -m radix_jax.aot.tpu_child JOBS RESULTS DUMP; see `tpu_compiling`.

It appends a pickled TpuProgram to RESULTS for each job, or a string that says what went wrong.
"""

import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from radix_jax.aot.tpu_compiling import TpuProgram
from radix_jax.aot.tpu_report import KERNEL_CODE, read_kernels
from radix_jax.aot.tpu_targets import TpuTarget


def compile_one(
    device: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    donate_argnums: Any,
    options: dict[str, Any],
    dump: Path,
) -> TpuProgram:
    """`fn` compiled for a device of a topology; `dump` is the folder that libtpu's flags name, and is emptied."""
    sharding = SingleDeviceSharding(device)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), args)
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh_of(device.device_kind, device.num_cores)):
        traced = jax.jit(fn, donate_argnums=donate_argnums).trace(*abstract)
        lowered = traced.lower(lowering_platforms=("tpu",))
    lowered_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        told = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options | told)
        compiled_at = time.perf_counter()
        text = _read_hlo(Path(folder))
    memory: Any = compiled.memory_analysis()
    kernels = read_kernels(dump, text)
    for path in dump.iterdir():
        path.unlink()
    return TpuProgram(
        lower_s=lowered_at - start,
        compile_s=compiled_at - lowered_at,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        text=KERNEL_CODE.sub('"body":""', text),
        kernels=tuple(kernels),
        bundles=tuple(kernels.values()),
    )


def _read_hlo(folder: Path) -> str:
    # Of the executable jax would have libtpu's text read by jaxlib, which knows less where libtpu is newer.
    (path,) = folder.glob("*.after_codegen.txt")
    return path.read_text()


def mesh_of(device_kind: str, num_cores: int | None) -> jax.sharding.AbstractMesh:
    """A mesh of one TPU: Pallas and our kernels ask the mesh what they are lowered for, or else the default device,
    which is a CPU here."""
    facts = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform="tpu")
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=facts)


def _device(target: TpuTarget) -> Any:
    # A single chip of the small generations is less than a host of the usual ones.
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if target.num_chips == 1 else {}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target.topology_name, **bounds)
    return topology.devices[0]


def main() -> None:
    """Compile every job."""
    jobs, results, dump = map(Path, sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")
    target, asked = pickle.loads(jobs.read_bytes())
    device: Any = None
    with results.open("wb") as file:
        for fn, args, donate_argnums, options in asked:
            try:
                device = device or _device(target)
                result: TpuProgram | str = compile_one(device, fn, args, donate_argnums, options, dump)
            except Exception as error:  # whatever a compiler raises is the job's result
                result = f"{type(error).__name__}: {error}"
            pickle.dump(result, file)
            file.flush()


if __name__ == "__main__":
    main()
