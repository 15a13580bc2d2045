"""GPUs to compile for: their facts, as data, and XLA's description of them."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FACTS = Path(__file__).with_name("targets.json")
# XLA asks for them; the kernels' code does not depend on them.
_VERSIONS = "13.0.0"
_DNN_VERSION = "9.12.0"
# The same on every GPU of compute capability 8 and 9.
_REGISTERS_PER_CORE = 65536
_THREADS_PER_WARP = 32
_REGISTER_GRANULE = 8  # registers a thread are allotted in steps of this
_SHARED_BYTES_PER_PROGRAM = 1024  # that the driver keeps for itself


@dataclass(frozen=True)
class Target:
    """A device, by its data sheet.

    capability: compute capability, with the suffix of the architecture's own instructions ("9.0a").
    shared_bytes_per_kernel: the most that one program may take. bandwidth_bytes_per_s: of its memory.
    half_flop_per_s, single_flop_per_s: dense, 16-bit floats by the tensor cores, and float32 without them.
    """

    name: str
    device_kind: str
    capability: str
    num_cores: int
    shared_bytes_per_core: int
    shared_bytes_per_kernel: int
    threads_per_core: int
    memory_bytes: int
    l2_bytes: int
    clock_ghz: float
    bandwidth_bytes_per_s: float
    half_flop_per_s: float
    single_flop_per_s: float

    @property
    def architecture(self) -> str:
        """As ptxas names it, e.g. "sm_90a"."""
        return "sm_" + self.capability.replace(".", "")

    @property
    def block_names(self) -> tuple[str, ...]:
        """The names under which block choices are looked up, the nearest first."""
        digits = self.architecture.rstrip("abcdefghijklmnopqrstuvwxyz")
        return self.device_kind, digits, digits[:-1]

    def flop_per_s(self, dtype_bytes: int) -> float:
        """Peak of matmuls of elements of that size."""
        return self.single_flop_per_s if dtype_bytes == 4 else self.half_flop_per_s

    def programs_per_core(self, *, registers: int, shared_bytes: int, num_threads: int) -> int:
        """How many programs of a kernel a core runs at once: what the scarcest of registers, shared memory and threads
        allows."""
        registers_a_program = -(-registers // _REGISTER_GRANULE) * _REGISTER_GRANULE * num_threads
        return min(
            _REGISTERS_PER_CORE // registers_a_program,
            self.shared_bytes_per_core // (shared_bytes + _SHARED_BYTES_PER_PROGRAM),
            self.threads_per_core // num_threads,
        )

    def description(self) -> str:
        """A GpuTargetConfigProto as text, from which XLA compiles without the device."""
        major, minor = self.capability.rstrip("a").split(".")
        dnn_version = " ".join(map("{}: {}".format, ("major", "minor", "patch"), _DNN_VERSION.split(".")))
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: {_THREADS_PER_WARP}
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes_per_core}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.num_cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.bandwidth_bytes_per_s)}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_bytes_per_kernel}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: {_REGISTERS_PER_CORE}
  registers_per_block_limit: {_REGISTERS_PER_CORE}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {self.capability}"
  device_address_bits: 64
  name: "{self.device_kind}"
  driver_version: "{_VERSIONS}"
  runtime_version: "{_VERSIONS}"
  compile_time_toolkit_version: "{_VERSIONS}"
  dnn_version: "{_DNN_VERSION}"
}}
platform_name: "CUDA"
dnn_version_info {{ {dnn_version} }}
device_description_str: "{self.device_kind}"
"""


@functools.cache
def targets() -> dict[str, Target]:
    """Every target, by name."""
    facts: dict[str, dict[str, Any]] = json.loads(_FACTS.read_text())
    return {name: Target(name=name, **fields) for name, fields in facts.items()}


def target_of(name: str) -> Target:
    """The target of that name.

    Raises:
        ValueError: an unknown name; it lists those there are.
    """
    if name not in targets():
        raise ValueError(f"target {name!r} is not one of {', '.join(targets())}")
    return targets()[name]
