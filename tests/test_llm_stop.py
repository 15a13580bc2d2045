"""Stop strings and samples through LLM: text, ids and reasons, among others and whatever the engine does."""

import functools
import itertools
from typing import Any

import pytest
from tiny import SMALL, assert_idle, dense_drawn, dense_greedy, drawn, finish, greedy, samples, tiny_llama
from tiny_llm import byte_tokenizer, new_llm

from radix_jax import LLM
from radix_jax.request import CompletionOutput
from radix_jax.text import StopText, Tokenizer

PROMPTS = ["the sea", "a", "the ship", "the ship sails", "b" * 40]
NUM_TOKENS = 24


@functools.cache
def tokenizer() -> Tokenizer:
    """All 512 ids of the model have text: bytes, and three letters each, none of which encoding makes."""
    pieces = ["".join(letters).encode() for letters in itertools.product("abcdefg", repeat=3)][:251]
    return byte_tokenizer(pieces=pieces)


@functools.cache
def kept_llm() -> LLM:
    return new_llm(tokenizer=tokenizer())


def expected_end(ids: list[int], stops: list[str], include_stop: bool = False) -> tuple[str, list[int], str | None]:
    """(text, ids, reason) of a completion that would say `ids`."""
    decode = tokenizer().decode
    for num_ids in range(1, len(ids) + 1):
        text = decode(ids[:num_ids])
        ends = [(text.index(stop) + len(stop), place) for place, stop in enumerate(stops) if stop in text]
        if ends:
            end, place = min(ends)
            return text[: end if include_stop else end - len(stops[place])], ids[:num_ids], stops[place]
    return decode(ids), ids, None


def end_of(completion: CompletionOutput) -> tuple[str, list[int], int | str | None]:
    assert (completion.finish_reason == "stop") is (completion.stop_reason is not None)
    return completion.text, completion.token_ids, completion.stop_reason


def stops_within(ids: list[int]) -> list[str]:
    """Strings of the text, of which the last one is the first to be complete, and one that is hardly ever in one."""
    text = tokenizer().decode(ids)
    whole = [text[i : i + 4] for i in range(8, len(text) - 4) if "\N{REPLACEMENT CHARACTER}" not in text[i : i + 4]]
    return ["abcdefg", *whole[::-7]]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_cache": False},
        {"overlap": False},
        {"mixed_steps": True, "max_prefill_tokens": 8},
        {"max_prefill_tokens": 4, "page_size": 2},
        {"page_size": 2, "num_pages": 45},
    ],
    ids=lambda fields: "-".join(f"{name}={value}" for name, value in fields.items()) or "plain",
)
def test_stops_and_samples_whatever_the_engine_does(fields: dict[str, Any]) -> None:
    encode = tokenizer().encode
    sampling, expected = [], []
    for place, prompt in enumerate(PROMPTS):
        n, include_stop = 1 + place % 3, place % 2 == 0
        ids = [dense_drawn(encode(prompt), NUM_TOKENS, place, index) for index in range(n)]
        stops = stops_within(ids[0])
        sampling.append(drawn(NUM_TOKENS, place, n=n, stop=stops, include_stop_str_in_output=include_stop))
        expected.append([expected_end(each, stops, include_stop) for each in ids])
    with new_llm(tokenizer=tokenizer(), **fields) as llm:
        for _ in range(2):  # cold, and from what the first round left in the cache
            outputs = llm.generate(PROMPTS, sampling)
            assert [[end_of(completion) for completion in output.outputs] for output in outputs] == expected
            assert_idle(llm.engine)
        assert llm.stats().num_evicted_tokens > 0 or "num_pages" not in fields
    assert {reason is None for ends in expected for _, _, reason in ends} == {True, False}


def test_at_the_same_token_a_stop_id_comes_first_and_the_length_last() -> None:
    """Whatever the reason is, the string does not leak."""
    ids = dense_drawn(list(b"a"), 12, 2)
    text, ids, stop = expected_end(ids, stops_within(ids))
    assert stop is not None
    params = [
        drawn(12, 2, stop=stop),
        drawn(12, 2, stop=stop, stop_token_ids=[ids[-1]]),
        drawn(len(ids), 2, stop=stop),
    ]
    assert ids.index(ids[-1]) == len(ids) - 1 < 11
    ends = [end_of(output.outputs[0]) for output in kept_llm().generate(["a"] * 3, params)]
    assert ends == [(text, ids, stop), (text, ids, ids[-1]), (text, ids, stop)]


def test_chats_stop_too() -> None:
    llm = kept_llm()
    talk = [{"role": "user", "content": "hi"}]
    [whole] = llm.chat(talk, greedy(12))
    stop = whole.outputs[0].text[2:4]
    [stopped] = llm.chat(talk, greedy(12, stop=stop))
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == (
        whole.outputs[0].text[: whole.outputs[0].text.index(stop)],
        stop,
    )


def test_samples_are_in_one_output() -> None:
    llm = kept_llm()
    ids = list(b"the ship")
    [output, other] = llm.generate(["the ship", "a"], [drawn(6, 3, n=3), greedy(2)])
    assert samples(output) == [dense_drawn(ids, 6, 3, index) for index in range(3)]
    assert [each.text for each in output.outputs] == [tokenizer().decode(each) for each in samples(output)]
    assert (output.prompt, other.prompt) == ("the ship", "a")


def test_a_queue_that_never_holds_the_samples_refuses_them_and_serves_the_rest() -> None:
    with new_llm(max_queued_requests=2) as llm:
        refused, served = llm.generate(["a", "the sea"], [greedy(2, n=3), greedy(2, n=2)])
        assert refused.error is not None
        assert "n=3 samples never fit max_queued_requests=2" in refused.error
        assert samples(served) == [dense_greedy(list(b"the sea"), 2)] * 2


def test_without_a_tokenizer_stop_strings_are_refused() -> None:
    with LLM(tiny_llama(), **SMALL) as llm:
        with pytest.raises(ValueError, match=r"stop=\('x',\) needs text, and this LLM has no tokenizer"):
            llm.generate([1, 2, 3], greedy(2, stop="x"))
        refused, served = llm.generate([[1, 2, 3]] * 2, [greedy(2, stop="x"), greedy(2)])
        assert refused.error is not None
        assert served.outputs[0].token_ids == dense_greedy([1, 2, 3], 2)


def test_samples_streamed_side_by_side() -> None:
    """As a server would: one StopText a sample, and pieces as they become certain."""
    llm = kept_llm()
    prompt = list(b"the ship sails")
    ids = [dense_drawn(prompt, NUM_TOKENS, 1, index) for index in range(3)]
    stops = stops_within(ids[0])
    texts = [StopText(llm.tokenizer, stops) for _ in range(3)]
    request_id = llm.engine.add_request(
        prompt, drawn(NUM_TOKENS, 1, n=3, stop=stops), finish_check=lambda index, new_ids: texts[index].push(new_ids)
    )
    given_out = [""] * 3
    expected = [expected_end(each, stops) for each in ids]
    while request_id in llm.engine.unfinished:
        for output in llm.engine.step():
            for completion in output.outputs:
                given_out[completion.index] += texts[completion.index].take()
                assert expected[completion.index][0].startswith(given_out[completion.index])
    assert [text + rest.finish() for text, rest in zip(given_out, texts, strict=True)] == [end[0] for end in expected]
    finish(llm.engine)
