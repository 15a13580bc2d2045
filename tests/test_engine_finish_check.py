"""finish_check through the engine: what it is told, what it ends, and what is refused."""

from typing import Any

import pytest
from plain_modules import plain_module
from tiny import (
    SMALL,
    assert_idle,
    counting_llama,
    dense_greedy,
    drawn,
    finish,
    greedy,
    samples,
    tiny_engine,
    tiny_llama,
)

from radix_jax import Engine, EngineConfig, SamplingParams
from radix_jax.request import FinishAt

EOS = 40


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each token is the one before plus 1, modulo 64, and EOS ends a request."""
    config = EngineConfig(**SMALL, overlap=request.param)
    return Engine(counting_llama(), None, config, eos_token_ids=[EOS])


def ends_at(token_id: int) -> Any:
    return lambda index, new_ids: FinishAt(new_ids.index(token_id) + 1, "it") if token_id in new_ids else None


@pytest.mark.parametrize(
    ("prompt", "fields", "end", "token_ids", "reason", "stop_reason"),
    [
        ([5], {}, 8, [6, 7, 8], "stop", "it"),
        ([5], {}, 6, [6], "stop", "it"),
        ([5], {"max_tokens": 3}, 8, [6, 7, 8], "stop", "it"),
        ([5], {"max_tokens": 2}, 8, [6, 7], "length", None),
        ([38], {}, EOS, [39, EOS], "stop", EOS),
        ([38], {"ignore_eos": True}, EOS, [39, EOS], "stop", "it"),
        ([5], {"stop_token_ids": [8]}, 8, [6, 7, 8], "stop", 8),
        ([5], {"stop_token_ids": [7]}, 8, [6, 7], "stop", 7),
        ([8], {}, 8, [9, 10], "length", None),  # the prompt is not looked at
    ],
)
def test_a_check_ends_a_request(
    engine: Engine, prompt: list[int], fields: dict[str, Any], end: int, token_ids: list[int], reason: str,
    stop_reason: int | str | None,
) -> None:  # fmt: skip
    sampling = SamplingParams(temperature=0.0, **({"max_tokens": 2 if prompt == [8] else 20} | fields))
    request_id = engine.add_request(prompt, sampling, finish_check=ends_at(end))
    other = engine.add_request([20], greedy(9))
    outputs = finish(engine)
    [completion] = outputs[request_id].outputs
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (token_ids, reason, stop_reason)
    assert outputs[other].outputs[0].token_ids == list(range(21, 30))
    assert_idle(engine)


def test_a_stream_ends_at_it(engine: Engine) -> None:
    outputs = list(engine.stream([5], greedy(20), finish_check=ends_at(8)))
    assert [output.outputs[0].token_ids for output in outputs] == [[6], [6, 7], [6, 7, 8]]
    assert [output.outputs[0].finish_reason for output in outputs] == [None, None, "stop"]
    assert_idle(engine)


def test_it_is_told_the_sample_and_each_of_its_ids_once() -> None:
    engine = tiny_engine()
    told: dict[int, list[int]] = {}
    request_id = engine.add_request(
        [1, 2, 3], drawn(7, 5, n=3), finish_check=lambda index, ids: told.setdefault(index, []).extend(ids)
    )
    output = finish(engine)[request_id]
    assert [told[index] for index in range(3)] == samples(output)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_it_raises_ends_its_sample_alone(overlap: bool) -> None:
    engine = tiny_engine(overlap=overlap)
    prompt = list(range(9))

    def check(index: int, new_ids: list[int]) -> None:
        if index == 1:
            raise KeyError("no such thing")

    other = engine.add_request([7, 8], greedy(6))
    failing = engine.add_request(prompt, greedy(6, n=3), finish_check=check)
    outputs = finish(engine)
    expected = dense_greedy(prompt, 6)
    assert samples(outputs[failing]) == [expected, expected[:1], expected]
    ends = [(each.finish_reason, each.stop_reason) for each in outputs[failing].outputs]
    assert ends == [("length", None), ("abort", "finish_check: KeyError: 'no such thing'"), ("length", None)]
    assert outputs[other].outputs[0].token_ids == dense_greedy([7, 8], 6)
    assert_idle(engine)


def test_an_interrupt_in_a_check_is_one_of_the_step() -> None:
    engine = tiny_engine()

    def interrupted(index: int, new_ids: list[int]) -> None:
        raise KeyboardInterrupt

    engine.add_request([1, 2, 3], greedy(6), finish_check=interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    assert not engine.has_unfinished()
    assert_idle(engine)


def test_what_is_refused() -> None:
    engine = plain_module("engine").Engine(tiny_llama(), None, EngineConfig(**SMALL))
    with pytest.raises(ValueError, match=r"stop=\('END',\): the engine knows ids and no text.*use LLM, or give a"):
        engine.add_request([1], greedy(3, stop="END"))
    with pytest.raises(TypeError, match="finish_check is a str; give a function"):
        engine.add_request([1], greedy(3), finish_check="END")
    assert not engine.has_unfinished()
    # Who gives a check says how strings are found.
    request_id = engine.add_request([1, 2, 3], greedy(3, stop="END"), finish_check=lambda index, ids: None)
    assert finish(engine)[request_id].outputs[0].token_ids == dense_greedy([1, 2, 3], 3)
