"""TPUs to compile for: their facts, as data. A target is one device of a topology, as jax lists them."""

import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FACTS = Path(__file__).with_name("tpu_targets.json")
_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*)+")
# What libtpu calls a generation, beside our name for it.
_ALIASES = {"tpu7x": "v7x"}
_WITH_STATIC_CYCLES = ("v6e", "v7x")


@dataclass(frozen=True)
class TpuTarget:
    """One device of a TPU topology, by its data sheet; on v4 and v7x a device is one of a chip's two cores.

    name: as it was asked for. shape: of the topology, in chips. granule_bytes: the unit in which kernels' code counts
    copies. memory_bytes: of the device; usable_bytes: what the compiler lets a program take of it. vmem_bytes: of a
    core. half_flop_per_s: dense, bfloat16, all cores of the device. matmul_flop_per_cycle: of a core's matrix units.
    """

    name: str
    generation: str
    shape: str
    device_kind: str
    prefix: str
    one_chip: str
    devices_per_chip: int
    cores_per_device: int
    granule_bytes: int
    memory_bytes: int
    usable_bytes: int
    vmem_bytes: int
    bandwidth_bytes_per_s: float
    half_flop_per_s: float
    matmul_flop_per_cycle: int
    clock_ghz: float

    @property
    def topology_name(self) -> str:
        """As libtpu names it, e.g. "tpu7x:2x2x1"."""
        return f"{self.prefix}:{self.shape}"

    @property
    def num_chips(self) -> int:
        """Of the topology."""
        return math.prod(map(int, self.shape.split("x")))

    @property
    def has_static_cycles(self) -> bool:
        """Whether libtpu estimates cycles for it; on other generations asking ends the process."""
        return self.generation in _WITH_STATIC_CYCLES

    def flop_per_s(self, dtype_bytes: int) -> float:
        """Peak of matmuls of elements of that size. float32 is rounded to bfloat16 by default."""
        del dtype_bytes
        return self.half_flop_per_s

    def cycles(self, num_bytes: float) -> float:
        """Core cycles in which the memory gives that many bytes."""
        return num_bytes / self.bandwidth_bytes_per_s * self.clock_ghz * 1e9


@functools.cache
def _facts() -> dict[str, dict[str, Any]]:
    return json.loads(_FACTS.read_text())


def tpu_generations() -> tuple[str, ...]:
    """Names of the generations."""
    return tuple(_facts())


def is_tpu_target(name: str) -> bool:
    """Whether a target's name is that of a TPU: of a generation, alone or with the shape of a topology."""
    generation = name.partition(":")[0]
    return _ALIASES.get(generation, generation) in _facts()


def tpu_target_of(name: str) -> TpuTarget:
    """One device of "v5e" (one chip), or of a topology such as "v5e:2x4", "v6e:2x2" or "tpu7x:2x2x1".

    Raises:
        ValueError: an unknown generation, or no shape of a topology of it.
    """
    asked, colon, shape = name.partition(":")
    generation = _ALIASES.get(asked, asked)
    if generation not in _facts():
        raise ValueError(f"target {name!r} is not one of {', '.join(_facts())}, alone or with a topology, as v5e:2x4")
    facts = _facts()[generation]
    one_chip = facts["one_chip"]
    if colon and (not _SHAPE.fullmatch(shape) or shape.count("x") != one_chip.count("x")):
        raise ValueError(f"target {name!r} has no shape of a topology behind the colon; give one as {asked}:{one_chip}")
    return TpuTarget(name=name, generation=generation, shape=shape or one_chip, **facts)
