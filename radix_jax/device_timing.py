"""What a call takes on the device at hand, and what that device does at best, measured in place.

A single call is mostly the way to the device and back. So calls are chained, each fed with what the one before gave,
inside one compiled program, and two such programs of different length are compared: what both have cancels out.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

COPY_BYTES = 2**30
MATMUL_SIZE = 8192


def time_calls(fn: Callable[..., Any], args: tuple[Any, ...], *, num_calls: int = 32, num_repeats: int = 5) -> float:
    """Seconds that one `fn(*args)` takes on the device, launch included.

    fn: can be traced; what it gives, or the first part of a tuple that it gives, has the shape and dtype of args[0],
    and becomes args[0] of the next call. num_calls: calls in the longer program beyond those of the shorter one.
    num_repeats: runs of each, the quickest of which counts.

    Raises:
        ValueError: a result that can't be fed back.
    """
    first, *rest = args
    given = jax.eval_shape(lambda first, rest: _first_of(fn(first, *rest)), first, rest)
    if (given.shape, given.dtype) != (first.shape, first.dtype):
        raise ValueError(
            f"calls can't be chained: they give {given.dtype}{list(given.shape)} and args[0] is "
            f"{first.dtype}{list(first.shape)}; wrap fn so that both are the same"
        )

    @functools.partial(jax.jit, static_argnums=0)
    def chain(length: int, first: jax.Array, rest: list[Any]) -> jax.Array:
        # The barrier keeps the compiler from melting two calls into one.
        step = lambda _, x: jax.lax.optimization_barrier(_first_of(fn(x, *rest)))  # noqa: E731
        return jax.lax.fori_loop(0, length, step, first)

    def seconds(length: int) -> float:
        def run() -> float:
            start = time.perf_counter()
            jax.block_until_ready(chain(length, first, rest))
            return time.perf_counter() - start

        run()
        return min(run() for _ in range(num_repeats))

    short = max(1, num_calls // 8)
    return max(0.0, seconds(short + num_calls) - seconds(short)) / num_calls


def measure_copy_bandwidth(num_bytes: int = COPY_BYTES) -> float:
    """Bytes a second, those read and those written, of a pass over an array of `num_bytes`."""
    x = jnp.zeros(num_bytes // 4, jnp.float32)
    return 2 * x.nbytes / time_calls(lambda x: x + 1.0, (x,))


def measure_matmul_peak(dtype: Any, size: int = MATMUL_SIZE) -> float:
    """Floating-point operations a second of a matmul of two `size` x `size` arrays of `dtype`."""
    # Values as in a model: a chip that multiplies zeros draws less power and runs faster.
    x, w = (jax.random.normal(jax.random.key(i), (size, size), jnp.float32) for i in range(2))
    w = (w / size**0.5).astype(dtype)
    return 2 * size**3 / time_calls(lambda x, w: (x @ w).astype(x.dtype), (x.astype(dtype), w), num_calls=16)


def _first_of(given: Any) -> jax.Array:
    return given[0] if isinstance(given, tuple | list) else given
