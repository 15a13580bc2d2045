"""Between steps the device is read at most once, and after a chunk that ends no prompt not at all."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from tiny import dense_greedy, finish, greedy, tiny_engine

from radix_jax import Engine, SamplingParams
from radix_jax.plan import Bucket
from radix_jax.request import MAX_LOGPROBS


class OnDevice:
    """A step's tokens that only `jax.device_get` can read: any other use of them fails."""

    def __init__(self, tokens: jax.Array) -> None:
        self.tokens = tokens
        self.shape, self.dtype = tokens.shape, tokens.dtype


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes in bytes of what was read from the device; steps of the engine give OnDevice."""
    sizes: list[int] = []
    device_get, compile_step = jax.device_get, tiny_engine().runner.compile

    def read(tree: Any) -> Any:
        leaves = jax.tree.leaves(tree)
        assert all(isinstance(value, OnDevice) for value in leaves)
        sizes.append(sum(value.tokens.nbytes for value in leaves))
        return device_get(jax.tree.map(lambda value: value.tokens, tree))

    def compile_guarded(bucket: Bucket, *args: Any) -> Callable[..., Any]:
        step = compile_step(bucket, *args)

        def run(*inputs: Any) -> tuple[Any, ...]:
            outputs = step(*(value.tokens if isinstance(value, OnDevice) else value for value in inputs))
            kv, state, *read = outputs
            return kv, state, *jax.tree.map(OnDevice, read)

        return step if bucket.kind in ("copy", "sampler") else run

    monkeypatch.setattr(jax, "device_get", read)
    monkeypatch.setattr(tiny_engine().runner, "compile", compile_guarded)
    yield sizes
    # The engine is kept for other tests, and its last tokens are an OnDevice.
    tiny_engine().flush_cache()
    tiny_engine().runner.renew_pool()


def step_guarded(engine: Engine) -> int:
    """Step with every implicit transfer forbidden; returns how many requests got a token."""
    with jax.transfer_guard("disallow"):
        return len(engine.step())


def test_one_small_read_a_step_and_none_for_a_chunk(reads: list[int]) -> None:
    engine = tiny_engine()
    prompts = [np.arange(120), np.arange(200, 205), np.arange(300, 330)]
    for prompt in prompts:
        engine.add_request(prompt, greedy(5))
    num_outputs = []
    num_reads = []
    while engine.has_unfinished():
        before = len(reads)
        num_outputs.append(step_guarded(engine))
        num_reads.append(len(reads) - before)
    assert num_outputs[0] == 0
    assert num_reads[0] == 0
    assert num_reads[1:] == [1] * (len(num_outputs) - 1)
    assert set(reads) == {8 * np.dtype(np.int32).itemsize}


def test_sampling_needs_no_other_read(reads: list[int]) -> None:
    engine = tiny_engine()
    engine.add_request(np.arange(9), SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=4))
    while engine.has_unfinished():
        step_guarded(engine)
    assert len(reads) == 4


def test_penalties_and_bias_need_no_other_read(reads: list[int]) -> None:
    engine = tiny_engine()
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 1.0, "logit_bias": {3: 2.0}}
    engine.add_request(np.arange(9), greedy(4, **penalties, stop_token_ids=[9], min_tokens=2))
    while engine.has_unfinished():
        step_guarded(engine)
    assert reads == [8 * np.dtype(np.int32).itemsize] * 4


def test_log_probabilities_come_with_the_tokens(reads: list[int]) -> None:
    """In the same read, and only in the steps of a request that asks."""
    engine = tiny_engine()
    engine.add_request(np.arange(120), greedy(3, logprobs=5))
    engine.add_request(np.arange(200, 205), greedy(6))
    num_reads = []
    while engine.has_unfinished():
        before = len(reads)
        step_guarded(engine)
        num_reads.append(len(reads) - before)
    assert num_reads == [0, *[1] * (len(num_reads) - 1)]
    tokens_bytes = 8 * np.dtype(np.int32).itemsize
    logprobs_bytes = 8 * (3 + 2 * MAX_LOGPROBS) * np.dtype(np.float32).itemsize
    assert set(reads) == {tokens_bytes, tokens_bytes + logprobs_bytes}
    assert reads.count(tokens_bytes + logprobs_bytes) == 3


def test_the_guarded_steps_are_the_real_ones(reads: list[int]) -> None:
    engine = tiny_engine()
    prompt = np.arange(40)
    request_id = engine.add_request(prompt, greedy(3))
    ids = finish(engine)[request_id].outputs[0].token_ids
    assert len(reads) == 3
    # The oracle reads the device in its own way, past the guard of this test's reads.
    assert ids == dense_greedy(prompt, 3)
