"""Programs of chained calls: compiled ahead in threads, timed later by comparing bursts of them.

Around a kernel of a few microseconds a wait for the device costs more than the kernel. So a program makes many calls,
each fed with what the one before gave; a burst queues several such programs behind each other and waits once; and a
long burst less a short one is what the programs took. The median of several such differences counts.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

# body(i, carry, *operands) -> carry, i the number of the call in its program.
Body = Callable[..., Any]


class Compiler:
    """Compiles in threads. XLA and ptxas run side by side there; tracing takes turns."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(num_threads or os.cpu_count() or 1, thread_name_prefix="compile")
        self._pending: set[Future[Any]] = set()

    def submit(self, compile_it: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Queue `compile_it(*args)`."""
        future = self._pool.submit(compile_it, *args)
        self._pending.add(future)
        return future

    def chain(
        self, body: Body, carry: Any, *operands: Any, length: int, donate: bool = False
    ) -> "Future[Callable[..., Any]]":
        """Queue a program of `length` calls of `body`, which takes (carry, *operands).

        donate: the carry's memory is used again, so it is gone after a call.
        """

        def program(carry: Any, *operands: Any) -> Any:
            return jax.lax.fori_loop(0, length, lambda i, carry: body(i, carry, *operands), carry)

        jitted = jax.jit(program, donate_argnums=(0,) if donate else ())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (carry, *operands))
        return self.submit(lambda: jitted.lower(*shapes).compile())

    def drain(self, timeout_s: float) -> int:
        """Wait until all that was queued is compiled, `timeout_s` at most; how many were given up."""
        _, late = wait(self._pending, timeout=max(0.0, timeout_s))
        for future in late:
            future.cancel()
        self._pending.clear()
        return len(late)

    def close(self) -> None:
        """Give up what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def time_program(
    program: Callable[..., Any],
    carry: Any,
    *operands: Any,
    length: int = 1,
    sample_s: float = 0.03,
    num_samples: int = 5,
) -> tuple[float, Any]:
    """(seconds a call, last carry) of a compiled program of `length` calls.

    sample_s: about how long a burst is. num_samples: differences of bursts, whose median counts.
    """

    def burst(num_programs: int, carry: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        for _ in range(num_programs):
            carry = program(carry, *operands)
        jax.block_until_ready(carry)
        return time.perf_counter() - start, carry

    _, carry = burst(1, carry)
    once_s, carry = burst(1, carry)
    num_more = min(200, max(2, math.ceil(sample_s / once_s)))
    num_short = max(1, num_more // 4)
    differences = []
    for _ in range(num_samples):
        short_s, carry = burst(num_short, carry)
        long_s, carry = burst(num_short + num_more, carry)
        differences.append((long_s - short_s) / num_more)
    return max(statistics.median(differences), 1e-9) / length, carry
