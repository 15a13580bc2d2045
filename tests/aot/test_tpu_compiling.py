"""Programs compiled for TPUs that are not there."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aot_extra import needs_libtpu
from jax.experimental import pallas as pl

from radix_jax.aot.tpu_compiling import TpuCompileError, TpuJob, TpuProgram, compile_all, compile_for_tpu
from radix_jax.aot.tpu_targets import tpu_generations, tpu_target_of

ROWS = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)


def square_kernel(x_ref: Any, out_ref: Any) -> None:
    x = x_ref[...]
    out_ref[...] = jnp.dot(x, x.T, preferred_element_type=jnp.float32)


def squares(x: jax.Array) -> jax.Array:
    call = pl.pallas_call(square_kernel, out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32), name="square")
    return call(x) + call(x * 2)


def doubled(x: jax.Array) -> jax.Array:
    return x * 2


def refused(x: jax.Array) -> jax.Array:
    raise NotImplementedError("not today")


def ends_the_process(x: jax.Array) -> jax.Array:
    os.abort()


@pytest.mark.slow
@needs_libtpu()
@pytest.mark.parametrize("name", [*tpu_generations(), "v5e:2x4", "v6e:2x2", "tpu7x:2x2x1"])
def test_a_kernel_for_each_generation(name: str) -> None:
    target = tpu_target_of(name)
    program = compile_for_tpu(target, squares, ROWS)
    (kernel,) = program.kernels
    assert (kernel.name, kernel.launches) == ("square", 2)
    assert kernel.bundles == program.bundles[0].total.bundles
    assert program.bundles[0].total.matmuls > 0
    assert kernel.static_cycles is None
    assert program.argument_bytes == 64 * 128 * 2
    assert '"body":""' in program.text


@pytest.mark.slow
@needs_libtpu()
@pytest.mark.parametrize("name", [name for name in tpu_generations() if tpu_target_of(name).has_static_cycles])
def test_cycles_where_they_are_asked_for(name: str) -> None:
    (program,) = compile_all(tpu_target_of(name), [TpuJob(squares, (ROWS,))], with_cycles=True)
    assert isinstance(program, TpuProgram)
    (kernel,) = program.kernels
    assert kernel.bundles == program.bundles[0].total.bundles
    assert kernel.static_cycles is not None
    assert kernel.static_cycles >= kernel.bundles


@pytest.mark.slow
@needs_libtpu()
def test_a_job_that_fails_leaves_the_others() -> None:
    jobs = [
        TpuJob(fn, (ROWS,), donate)
        for fn, donate in ((doubled, 0), (refused, ()), (ends_the_process, ()), (doubled, ()))
    ]
    given, no, ended, kept = compile_all(tpu_target_of("v5e"), jobs)
    assert isinstance(no, TpuCompileError)
    assert "NotImplementedError: not today" in str(no)
    assert isinstance(ended, TpuCompileError)
    assert "the compiling process for v5e ended" in str(ended)
    assert isinstance(given, TpuProgram)
    assert isinstance(kept, TpuProgram)
    assert (given.alias_bytes, kept.alias_bytes) == (64 * 128 * 2, 0)


@needs_libtpu()
def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"give a function of a module, or a functools\.partial of one"):
        compile_for_tpu(tpu_target_of("v5e"), lambda x: x, ROWS)
