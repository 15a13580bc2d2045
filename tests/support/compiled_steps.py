"""Steps compiled as the engine compiles them, and a look into the program for copies of the pool."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny import TINY, random_weights

from radix_jax.functional import init_kv
from radix_jax.models.registry import make_params
from radix_jax.pallas_kernels.paged_attention import write_pages
from radix_jax.plan import Bucket
from radix_jax.runner.pack import empty_copies, empty_step
from radix_jax.runner.runner import copy_step, decode_step, prefill_step
from radix_jax.runner.sampler_state import (
    empty_sampler_row,
    empty_sampler_state,
    fill_sampler_row,
    sampler_state_bytes,
)

STEPS: dict[str, Callable[..., Any]] = {"prefill": prefill_step, "decode": decode_step}
BUCKETS = {"prefill": Bucket("prefill", 64, 8, 32), "decode": Bucket("decode", 8, 8, 32)}
PAGE_SIZE = 4
# Pages a layer; the larger pool outgrows all that a step needs besides.
SMALL_POOL, LARGE_POOL = 2000, 8000
NUM_SEATS = 8
SAMPLER_BYTES = sampler_state_bytes(NUM_SEATS, TINY.vocab_size)

# Without moving data, or in place: of a fusion its root counts, and what a loop or a branch does is in its own lines.
_IN_PLACE = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice", "fusion"),
    *("while", "conditional", "call"),
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(")
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")
_CALLED = re.compile(r"calls=%?([\w.-]+)")
# Of a kernel: what of its result, by number where there are several, is written where an operand was.
_ALIASED = re.compile(r"\{(\d*)\}: \(")


@functools.cache
def compile_step(kind: str, num_pages: int, *, donate: bool = True, num_seats: int = NUM_SEATS) -> jax.stages.Compiled:
    """A step of the tiny model over a pool of `num_pages` pages a layer."""
    params = make_params(TINY, random_weights(TINY))
    kv = jax.eval_shape(lambda: init_kv(TINY, num_pages, PAGE_SIZE))
    state = jax.eval_shape(lambda: empty_sampler_state(num_seats, TINY.vocab_size))
    bucket = BUCKETS[kind]
    step = jax.jit(functools.partial(STEPS[kind], bucket=bucket), donate_argnums=(1, 2) if donate else ())
    return step.lower(params, kv, state, np.zeros(8, np.int32), empty_step(bucket).buffer).compile()


@functools.cache
def compile_sampler_row(num_seats: int) -> jax.stages.Compiled:
    """The filling of one row of such a step's sampler state."""
    state = jax.eval_shape(lambda: empty_sampler_state(num_seats, TINY.vocab_size))
    return jax.jit(fill_sampler_row, donate_argnums=0).lower(state, empty_sampler_row(TINY.vocab_size)).compile()


@functools.cache
def compile_copies(num_pages: int) -> jax.stages.Compiled:
    """The copies in front of a step of 8 rows, over such a pool."""
    kv = jax.eval_shape(lambda: init_kv(TINY, num_pages, PAGE_SIZE))
    step = jax.jit(functools.partial(copy_step, num_layers=TINY.num_layers), donate_argnums=0)
    return step.lower(kv, empty_copies(8, num_pages)).compile()


@functools.cache
def compile_page_write(num_pages: int) -> jax.stages.Compiled:
    """Eight pages carried into such a pool."""
    kv = jax.eval_shape(lambda: init_kv(TINY, num_pages, PAGE_SIZE))
    pages = jax.ShapeDtypeStruct((8,), jnp.int32)
    values = jax.ShapeDtypeStruct((8, TINY.num_layers, *kv.shape[1:]), kv.dtype)
    write = jax.jit(functools.partial(write_pages, num_layers=TINY.num_layers), donate_argnums=0)
    return write.lower(kv, pages, values).compile()


def pool_bytes(num_pages: int) -> int:
    """Bytes of such a pool, float32."""
    return (
        TINY.num_layers * num_pages * PAGE_SIZE * 2 * TINY.num_kv_heads * TINY.head_dim * np.dtype("float32").itemsize
    )


def pool_copies(program: str, num_elements: int) -> list[str]:
    """Opcodes of the instructions that make an array of at least `num_elements` elements anew."""
    roots: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    computation = ""
    for line in program.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif instruction := _INSTRUCTION.match(line):
            is_root, result, opcode = instruction.groups()
            if is_root:
                roots[computation] = opcode
            large = {i for i, shape in enumerate(_ARRAY.findall(result)) if _num_elements(shape) >= num_elements}
            if large:
                called = _CALLED.search(line)
                in_place = opcode == "custom-call" and large <= {int(i or 0) for i in _ALIASED.findall(line)}
                found.append(("bitcast" if in_place else opcode, called[1] if called else ""))
    assert found, "the program has no pool"
    made_by = [roots[called] if opcode == "fusion" else opcode for opcode, called in found]
    return [opcode for opcode in made_by if opcode not in _IN_PLACE]


def _num_elements(shape: str) -> int:
    return math.prod(int(size) for size in shape.split(",") if size)
