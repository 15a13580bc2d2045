"""The pool is never copied: the donated buffer is used again, and no step needs room for a second one."""

import warnings

import jax
import numpy as np
import pytest
from compiled_steps import STEPS, compile_step, pool_bytes
from tiny import TINY, greedy, random_weights, tiny_engine

NUM_PAGES = 8000


def test_each_step_hands_the_same_memory_on() -> None:
    engine = tiny_engine()
    kinds = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.add_request(np.arange(100), greedy(4))
        while engine.has_unfinished():
            before, stats = engine.runner.kv, engine.stats()
            address = before.unsafe_buffer_pointer()
            engine.step()
            assert before.is_deleted()
            assert engine.runner.kv.unsafe_buffer_pointer() == address
            kinds.append("prefill" if engine.stats().num_prefill_steps > stats.num_prefill_steps else "decode")
    assert kinds == ["prefill", "prefill", "decode", "decode", "decode"]


@pytest.mark.parametrize("kind", STEPS)
def test_peak_memory_is_weights_and_pool(kind: str) -> None:
    analysis = compile_step(kind, NUM_PAGES).memory_analysis()
    assert analysis.alias_size_in_bytes >= pool_bytes(NUM_PAGES)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(random_weights(TINY)))
    peak_bytes = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    assert peak_bytes < weight_bytes + 1.1 * pool_bytes(NUM_PAGES)
