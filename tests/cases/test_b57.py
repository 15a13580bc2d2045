"""The pool is never copied: the donated buffer is used again, and no step needs room for a second one. The sampler's
state likewise."""

import warnings

import jax
import numpy as np
import pytest
from compiled_steps import LARGE_POOL, SAMPLER_BYTES, STEPS, compile_step, pool_bytes
from tiny import TINY, greedy, random_weights, tiny_engine

from radix_jax.plan import StepPlan
from radix_jax.runner import StepHandle


def test_each_step_hands_the_same_memory_on() -> None:
    engine = tiny_engine()
    kinds = []
    dispatch = engine.runner.dispatch

    def watched(plan: StepPlan) -> StepHandle:
        before = jax.tree.leaves((engine.runner.kv, engine.runner.sampler_state))
        addresses = [array.unsafe_buffer_pointer() for array in before]
        handle = dispatch(plan)
        assert all(array.is_deleted() for array in before)
        after = jax.tree.leaves((engine.runner.kv, engine.runner.sampler_state))
        assert [array.unsafe_buffer_pointer() for array in after] == addresses
        kinds.append(plan.kind)
        return handle

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr(engine.runner, "dispatch", watched)
        engine.add_request(np.arange(100), greedy(4, presence_penalty=0.5, logit_bias={3: 1.0}, logprobs=2))
        while engine.has_unfinished():
            engine.step()
    assert kinds == ["prefill", "prefill", "decode", "decode", "decode"]


@pytest.mark.parametrize("kind", STEPS)
def test_peak_memory_is_weights_and_pool(kind: str) -> None:
    analysis = compile_step(kind, LARGE_POOL).memory_analysis()
    assert analysis.alias_size_in_bytes >= pool_bytes(LARGE_POOL) + SAMPLER_BYTES
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(random_weights(TINY)))
    peak_bytes = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    assert peak_bytes < weight_bytes + 1.1 * pool_bytes(LARGE_POOL)
