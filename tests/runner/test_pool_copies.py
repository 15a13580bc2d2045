"""Neither a step nor a copy of pages copies the pool: it is updated in place, whatever its size."""

import functools

import jax
import pytest
from compiled_steps import STEPS, compile_copies, compile_step, pool_bytes, pool_copies

NUM_PAGES = 300
FLOAT_BYTES = 4


@functools.cache
def compiled(kind: str, num_pages: int) -> jax.stages.Compiled:
    return compile_copies(num_pages) if kind == "copy" else compile_step(kind, num_pages)


@pytest.mark.parametrize("kind", [*STEPS, "copy"])
def test_the_whole_pool_is_aliased(kind: str) -> None:
    for num_pages in (NUM_PAGES, 4 * NUM_PAGES):
        analysis = compiled(kind, num_pages).memory_analysis()
        assert analysis.alias_size_in_bytes == pool_bytes(num_pages)


@pytest.mark.parametrize("kind", [*STEPS, "copy"])
def test_temporary_memory_does_not_grow_with_the_pool(kind: str) -> None:
    small, large = (compiled(kind, num_pages).memory_analysis() for num_pages in (NUM_PAGES, 4 * NUM_PAGES))
    assert small.temp_size_in_bytes == large.temp_size_in_bytes > 0
    assert large.temp_size_in_bytes < pool_bytes(4 * NUM_PAGES)


@pytest.mark.parametrize("kind", [*STEPS, "copy"])
def test_no_instruction_makes_a_pool(kind: str) -> None:
    num_pages = 4 * NUM_PAGES
    assert pool_copies(compiled(kind, num_pages).as_text(), pool_bytes(num_pages) // FLOAT_BYTES) == []


def test_a_copy_would_be_seen() -> None:
    """Where the pool is not donated it has to be copied."""
    step = compile_step("decode", 4 * NUM_PAGES, donate=False)
    assert step.memory_analysis().alias_size_in_bytes == 0
    assert "copy" in pool_copies(step.as_text(), pool_bytes(4 * NUM_PAGES) // FLOAT_BYTES)
