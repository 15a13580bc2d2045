"""An engine on a kernel of one's own keeps the one that it was made with."""

from collections.abc import Iterator
from typing import Any

import pytest
from tiny import SMALL, dense_greedy, generate, greedy, tiny_llama, token_ids

from radix_jax import Engine, EngineConfig, attention_backends, register_attention_backend
from radix_jax.pallas_kernels.paged_attention import paged_attention

PROMPT = [5, 9, 2, 7, 1]


@pytest.fixture
def own_names() -> Iterator[None]:
    """What a test registers is forgotten."""
    before = dict(attention_backends._registered)
    yield
    attention_backends._registered.clear()
    attention_backends._registered.update(before)


@pytest.mark.usefixtures("own_names")
def test_a_name_that_is_given_away_later() -> None:
    calls = []

    def mine(*operands: Any, **options: Any) -> Any:
        calls.append(options["max_q_len"])
        return paged_attention(*operands, **options, backend="xla")

    def other(*operands: Any, **options: Any) -> Any:
        raise AssertionError("registered after the engine was made")

    register_attention_backend("mine", mine)
    engine = Engine(tiny_llama(), None, EngineConfig(**(SMALL | {"attention_backend": "mine"})))
    register_attention_backend("mine", other)
    assert token_ids(generate(engine, [PROMPT], greedy(3))) == [dense_greedy(PROMPT, 3)]
    assert set(calls) == {1, 64}, "decode and prefill"
