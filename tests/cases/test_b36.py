"""Penalties act, and presence and frequency count the output alone, repetition prompt and output."""

import jax
import numpy as np
import pytest

from radix_jax import SamplingParams
from radix_jax.plan import Bucket, StepPlan, StepRow
from radix_jax.request import Request
from radix_jax.runner.pack import Packer
from radix_jax.runner.sampler_state import adjust, count_tokens, empty_sampler_state, fill_sampler_row, sampler_row

LOGITS = np.array([[2.0, 1.0, -1.0, 0.5]], np.float32)
PROMPT, OUTPUT = [0, 2], [1, 1]
VOCAB_SIZE, NUM_SEATS, SEAT = 4, 3, 2


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_repetition_over_prompt_and_output_then_the_others_over_the_output(num_known: int) -> None:
    """Through the engine's own parts: of the output `num_known` tokens are known when the request is let in, which is
    how it goes after a retraction, the others are counted as they are sampled."""
    request = Request(
        request_id="r",
        token_ids=np.array(PROMPT, np.int32),
        sampling=SamplingParams(repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=0.25),
        max_tokens=3,
        stop_ids=frozenset(),
        seed=0,
        arrival=0,
    )
    known = np.array(OUTPUT[:num_known], np.int32)
    token_ids = np.append(request.token_ids, known)
    row = StepRow(request, token_ids, 0, np.array([1], np.int32), True, seat=SEAT, output_ids=known)
    packed = Packer(page_size=4, num_slots=100).pack(StepPlan("prefill", (row,), Bucket("prefill", 8, 1, 1), 1))
    state = jax.jit(fill_sampler_row)(empty_sampler_state(NUM_SEATS, VOCAB_SIZE), sampler_row(row, VOCAB_SIZE))
    for token in OUTPUT[num_known:]:
        state = jax.jit(count_tokens)(state, packed.sampling, np.array([token], np.int32))
    after = jax.jit(adjust)(LOGITS, packed.sampling, state)
    np.testing.assert_allclose(after, [[1.6, -0.45, -1.25, 0.5]], rtol=1e-6)
