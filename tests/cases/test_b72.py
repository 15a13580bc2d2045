"""KV is shared inside one namespace alone."""

import numpy as np
import pytest
from tiny import dense_greedy, finish, greedy, tiny_engine

from radix_jax import Engine

PROMPT = np.arange(40, dtype=np.int32)
FULL = len(PROMPT) - 1


def cached_tokens(engine: Engine, namespace: object) -> int:
    request_id = engine.add_request(PROMPT, greedy(3), namespace=namespace)
    output = finish(engine)[request_id]
    assert output.outputs[0].token_ids == dense_greedy(PROMPT, 3)
    return output.cached_tokens


def test_none_a_b_a() -> None:
    engine = tiny_engine()
    assert [cached_tokens(engine, namespace) for namespace in (None, "a", "b", "a")] == [0, 0, 0, FULL]
    assert cached_tokens(engine, None) == FULL


@pytest.mark.parametrize("others", [(1, "1", 1.5, True), ((1, 2), (2, 1), "12", frozenset([1, 2])), ("", None, 0, ())])
def test_namespaces_that_look_alike_are_apart(others: tuple[object, ...]) -> None:
    engine = tiny_engine()
    assert [cached_tokens(engine, namespace) for namespace in others] == [0] * len(others)
    assert [cached_tokens(engine, namespace) for namespace in others] == [FULL] * len(others)


def test_requests_of_different_namespaces_that_come_together_share_nothing() -> None:
    engine = tiny_engine()
    request_ids = [engine.add_request(PROMPT, greedy(3), namespace=name) for name in ("a", "b", "a", "b")]
    outputs = finish(engine)
    # All four run in one step, so what is shared is whole pages: a copy would come before the page is written.
    shared_len = FULL // engine.config.page_size * engine.config.page_size
    assert [outputs[request_id].cached_tokens for request_id in request_ids] == [0, 0, shared_len, shared_len]
    assert {tuple(outputs[request_id].outputs[0].token_ids) for request_id in request_ids} == {
        tuple(dense_greedy(PROMPT, 3))
    }
