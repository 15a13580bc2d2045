"""finish_reason is in every state of a stream: None until the last, then the reason, once."""

import pytest
from tiny import SMALL, counting_llama, greedy
from tiny_llm import letter_core

from radix_jax import LLM, Engine, EngineConfig, SamplingParams
from radix_jax.text import StopText, Tokenizer

EOS_ID = 9
ENDS = {
    "eos": (greedy(20), [7, 8, 9], "stop", 9),
    "stop_id": (greedy(20, stop_token_ids=[8]), [7, 8], "stop", 8),
    "length": (greedy(2), [7, 8], "length", None),
    "length_of_one": (greedy(1), [7], "length", None),
    "first_token_is_eos": (greedy(20), [9], "stop", 9),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(counting_llama(), None, EngineConfig(**SMALL), eos_token_ids=[EOS_ID])


@pytest.mark.parametrize("end", ENDS)
def test_streamed(engine: Engine, end: str) -> None:
    sampling, ids, reason, stop_id = ENDS[end]
    prompt = [ids[0] - 1]
    states = list(engine.stream(prompt, sampling))
    assert [state.outputs[0].token_ids for state in states] == [ids[: n + 1] for n in range(len(ids))]
    assert [state.outputs[0].finish_reason for state in states] == [None] * (len(ids) - 1) + [reason]
    assert [state.outputs[0].stop_reason for state in states] == [None] * (len(ids) - 1) + [stop_id]
    assert [state.finished for state in states] == [False] * (len(ids) - 1) + [True]
    assert not engine.has_unfinished()


def test_streamed_to_a_stop_string() -> None:
    """Ids are letters; the one that completes the string is the last."""
    tokenizer = Tokenizer(letter_core())
    with LLM(counting_llama(), tokenizer=tokenizer, **SMALL) as llm:
        text = StopText(tokenizer, [tokenizer.decode([8, 9])])
        states, pieces = [], []
        sampling = greedy(20, stop=tokenizer.decode([8, 9]))
        for state in llm.engine.stream([5], sampling, finish_check=lambda _, ids: text.push(ids)):
            states.append(state)
            pieces.append(text.take() if not state.finished else text.finish())
    assert [state.outputs[0].token_ids for state in states] == [[6], [6, 7], [6, 7, 8], [6, 7, 8, 9]]
    assert [state.outputs[0].finish_reason for state in states] == [None, None, None, "stop"]
    assert [state.outputs[0].stop_reason for state in states] == [None, None, None, tokenizer.decode([8, 9])]
    assert pieces == [tokenizer.decode([6]), tokenizer.decode([7]), "", ""]


def test_in_steps_of_many_requests(engine: Engine) -> None:
    ends = [ENDS["eos"], ENDS["stop_id"], ENDS["length"], ENDS["length_of_one"]]
    kinds: dict[str, tuple[SamplingParams, list[int], str, int | None]] = {}
    for end in ends:
        kinds[engine.add_request([end[1][0] - 1], end[0])] = end
    reasons: dict[str, list[str | None]] = {request_id: [] for request_id in kinds}
    while engine.has_unfinished():
        for state in engine.step():
            reasons[state.request_id].append(state.outputs[0].finish_reason)
    for request_id, (_, ids, reason, _) in kinds.items():
        assert reasons[request_id] == [None] * (len(ids) - 1) + [reason]


def test_an_abort_is_told_once(engine: Engine) -> None:
    request_id = engine.add_request([20], greedy(20))
    [state] = engine.step()
    assert state.outputs[0].finish_reason is None
    aborted = engine.abort(request_id)
    assert aborted is not None
    assert (aborted.finished, aborted.outputs[0].finish_reason) == (True, "abort")
    assert engine.abort(request_id) is None
    assert engine.step() == []
