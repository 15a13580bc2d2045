"""Neither a step nor what comes before it copies the pool or the sampler's state: they are updated in place, whatever
their size."""

import jax
import pytest
from compiled_steps import (
    LARGE_POOL,
    SAMPLER_BYTES,
    SMALL_POOL,
    STEPS,
    compile_copies,
    compile_page_write,
    compile_sampler_row,
    compile_step,
    pool_bytes,
    pool_copies,
)
from tiny import TINY

from radix_jax.runner.sampler_state import sampler_state_bytes

LARGE_POOL_LEN = pool_bytes(LARGE_POOL) // 4  # in float32
KINDS = (*STEPS, "copy", "write")


def compiled(kind: str, num_pages: int) -> jax.stages.Compiled:
    if kind == "write":
        return compile_page_write(num_pages)
    return compile_copies(num_pages) if kind == "copy" else compile_step(kind, num_pages)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_pool_is_aliased(kind: str) -> None:
    """And in a step all of the sampler's state."""
    for num_pages in (SMALL_POOL, LARGE_POOL):
        analysis = compiled(kind, num_pages).memory_analysis()
        assert analysis.alias_size_in_bytes == pool_bytes(num_pages) + (SAMPLER_BYTES if kind in STEPS else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_temporary_memory_does_not_grow_with_the_pool(kind: str) -> None:
    small, large = (compiled(kind, num_pages).memory_analysis() for num_pages in (SMALL_POOL, LARGE_POOL))
    assert small.temp_size_in_bytes == large.temp_size_in_bytes > 0
    assert large.temp_size_in_bytes < pool_bytes(LARGE_POOL)


@pytest.mark.parametrize("kind", KINDS)
def test_no_instruction_makes_a_pool(kind: str) -> None:
    assert pool_copies(compiled(kind, LARGE_POOL).as_text(), LARGE_POOL_LEN) == []


# So many that a table of theirs outgrows the small pool.
MANY_SEATS = 4096
TABLE_LEN = MANY_SEATS * TINY.vocab_size


def compiled_with_many_seats(kind: str) -> jax.stages.Compiled:
    return compile_sampler_row(MANY_SEATS) if kind == "sampler" else compile_step(kind, 200, num_seats=MANY_SEATS)


@pytest.mark.parametrize("kind", [*STEPS, "sampler"])
def test_no_instruction_makes_a_table_of_the_sampler(kind: str) -> None:
    program = compiled_with_many_seats(kind)
    assert pool_copies(program.as_text(), TABLE_LEN) == []
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes >= sampler_state_bytes(MANY_SEATS, TINY.vocab_size)
    assert analysis.temp_size_in_bytes < 4 * TABLE_LEN


def test_a_copy_would_be_seen() -> None:
    """Where the pool is not donated it has to be copied."""
    step = compile_step("decode", LARGE_POOL, donate=False)
    assert step.memory_analysis().alias_size_in_bytes == 0
    assert "copy" in pool_copies(step.as_text(), LARGE_POOL_LEN)
    step = compile_step("decode", 200, donate=False, num_seats=MANY_SEATS)
    assert "copy" in pool_copies(step.as_text(), TABLE_LEN)
