"""LLM: prompts in, outputs in the same order, refusals one by one, and nothing left behind by an interrupt."""

import io
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_modules import plain_module
from tiny import MAX_LEN, SMALL, TINY, assert_idle, dense_greedy, greedy, random_prompts, tiny_llama
from tiny_llm import END_ID, Terminal, byte_tokenizer, new_llm, tiny_llm, write_folder

from radix_jax import LLM, RequestOutput, SamplingParams
from radix_jax.llm import _ProgressBar
from radix_jax.text import TextError

pytestmark = pytest.mark.usefixtures("usual_interrupts")

TEXTS = ("a", "the sea", "the ship", "the ship sails")


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def generated(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_texts_ids_and_arrays_in_one_list_keep_their_order() -> None:
    prompts = ["the ship", ids_of("the sea"), np.array(ids_of("a"), np.int64), "the ship sails", tuple(ids_of("a"))]
    as_ids = [ids_of("the ship"), ids_of("the sea"), ids_of("a"), ids_of("the ship sails"), ids_of("a")]
    outputs = tiny_llm().generate(prompts, greedy(6))
    assert [output.prompt_token_ids for output in outputs] == as_ids
    assert generated(outputs) == [dense_greedy(ids, 6) for ids in as_ids]
    assert [output.prompt for output in outputs] == ["the ship", None, None, "the ship sails", None]
    assert all(output.finished and output.error is None for output in outputs)
    for output in outputs:
        assert output.outputs[0].text == byte_tokenizer().decode(output.outputs[0].token_ids)


def test_log_probabilities_have_the_text_of_their_tokens() -> None:
    """Each by itself: half a character has none, and a special token has its name."""
    bias = {END_ID: 100.0}
    params = greedy(3, logprobs=5, logit_bias=bias)
    [biased, plain] = tiny_llm().generate(["the ship", "the sea"], [params, greedy(3)])
    [completion] = biased.outputs
    assert completion.token_ids == [END_ID]
    assert completion.logprobs is not None
    [entry] = completion.logprobs
    assert len(entry) == 6
    assert entry[END_ID].decoded_token == "<|end|>"
    tokenizer = byte_tokenizer()
    for token_id, one in entry.items():
        assert one.decoded_token == tokenizer.decode([token_id], skip_special_tokens=False)
    assert completion.cumulative_logprob == entry[END_ID].logprob < -1.0
    assert plain.outputs[0].logprobs is None


def test_many_more_prompts_than_rows() -> None:
    prompts = random_prompts(21, lens=(1, 60), num_stems=3)
    outputs = tiny_llm().generate(prompts, greedy(3))
    assert [output.prompt_token_ids for output in outputs] == [prompt.tolist() for prompt in prompts]
    assert generated(outputs) == [dense_greedy(prompt, 3) for prompt in prompts]


def test_more_prompts_than_may_wait() -> None:
    prompts = random_prompts(7, lens=(1, 20))
    llm = new_llm(max_queued_requests=1)
    assert generated(llm.generate(prompts, greedy(3))) == [dense_greedy(prompt, 3) for prompt in prompts]
    assert_idle(llm.engine)


@pytest.mark.parametrize("prompt", ["the sea", ids_of("the sea"), np.array(ids_of("the sea"))])
def test_one_prompt_gives_a_list_of_one(prompt: Any) -> None:
    [output] = tiny_llm().generate(prompt, greedy(4))
    assert output.prompt_token_ids == ids_of("the sea")
    assert output.outputs[0].token_ids == dense_greedy(ids_of("the sea"), 4)


def test_rows_of_an_array_are_prompts() -> None:
    rows = np.array([ids_of("abc"), ids_of("abd")])
    assert generated(tiny_llm().generate(rows, greedy(2))) == [dense_greedy(row, 2) for row in rows]


def test_no_prompts_give_no_outputs() -> None:
    assert tiny_llm().generate([]) == []
    assert tiny_llm().generate([], []) == []


def test_one_sampling_params_each() -> None:
    outputs = tiny_llm().generate(TEXTS, [greedy(n) for n in (1, 5, 2, 7)])
    assert [len(ids) for ids in generated(outputs)] == [1, 5, 2, 7]
    assert generated(outputs) == [dense_greedy(ids_of(t), n) for t, n in zip(TEXTS, (1, 5, 2, 7), strict=True)]


def test_as_many_sampling_params_as_prompts() -> None:
    with pytest.raises(ValueError, match="2 SamplingParams for 4 prompts"):
        tiny_llm().generate(TEXTS, [greedy(1), greedy(2)])
    with pytest.raises(ValueError, match="0 SamplingParams for 4 prompts"):
        tiny_llm().generate(TEXTS, [])


def test_default_sampling_is_vllms() -> None:
    [output] = tiny_llm().generate("the sea")
    [completion] = output.outputs
    assert SamplingParams().max_tokens == 16
    assert len(completion.token_ids) == 16 or completion.token_ids[-1] == END_ID


def test_a_bad_prompt_is_refused_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny_llm()
    too_long = [1] * 200
    outputs = llm.generate(["the sea", "", too_long, [1, 512], "a"], greedy(3))
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    assert generated([outputs[0], outputs[4]]) == [dense_greedy(ids_of(text), 3) for text in ("the sea", "a")]
    for output, words in zip(outputs[1:4], ("empty prompt", "200 tokens .* max_model_len=128", "512"), strict=True):
        assert output.finished
        assert output.outputs == []
        assert output.error is not None
        assert re.search(words, output.error)
    assert outputs[1].prompt == ""
    assert sum("a prompt was refused" in record.getMessage() for record in caplog.records) == 3
    assert_idle(llm.engine)


def test_the_error_is_raised_if_no_prompt_can_be_served() -> None:
    llm = tiny_llm()
    with pytest.raises(ValueError, match="200 tokens exceeds max_model_len=128"):
        llm.generate([[1] * 200, ""])
    assert_idle(llm.engine)


@pytest.mark.parametrize("prompts", [["the sea", [1.5]], ["the sea", [True]], ["the sea", 7], b"the sea", 7, None])
def test_what_is_no_prompt_is_a_type_error_and_leaves_nothing(prompts: Any) -> None:
    llm = tiny_llm()
    with pytest.raises(TypeError):
        llm.generate(prompts, greedy(3))
    assert_idle(llm.engine)


def test_chat_uses_the_template() -> None:
    llm = tiny_llm()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    [output] = llm.chat(messages, greedy(8))
    ids = llm.tokenizer.encode_chat(messages).tolist()
    assert output.prompt_token_ids == ids
    assert llm.tokenizer.decode(ids, skip_special_tokens=False) == "<|system|>s<|user|>hello<|assistant|>"
    assert output.outputs[0].token_ids == dense_greedy(ids, 8)


def test_a_second_turn_is_served_from_the_cache() -> None:
    llm = tiny_llm()
    messages = [{"role": "user", "content": "tell me of the sea"}]
    first = llm.chat(messages, greedy(1))[0]
    messages += [{"role": "assistant", "content": "blue"}, {"role": "user", "content": "more"}]
    second = llm.chat(messages, greedy(1))[0]
    assert second.cached_tokens == len(first.prompt_token_ids)


def test_several_chats_at_once() -> None:
    llm = tiny_llm()
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    outputs = llm.chat(chats, greedy(3))
    assert generated(outputs) == [dense_greedy(llm.tokenizer.encode_chat(chat), 3) for chat in chats]


def test_a_chat_goes_on_to_the_end_of_the_context() -> None:
    llm = tiny_llm()
    [output] = llm.chat([{"role": "user", "content": "x" * 100}])
    [completion] = output.outputs
    if completion.finish_reason == "length":
        assert len(output.prompt_token_ids) + len(completion.token_ids) == MAX_LEN
    else:
        assert completion.token_ids[-1] in llm.tokenizer.eos_token_ids


def test_no_messages_are_refused() -> None:
    with pytest.raises(TextError, match="messages is empty"):
        tiny_llm().chat([])


@pytest.mark.parametrize("messages", [{"role": "user", "content": "the sea"}, iter([]), "the sea", None])
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    # Without the runtime type checks of tests, so that a wrong type reaches our own checks.
    llm = plain_module("llm").LLM(tiny_llama(), tokenizer=byte_tokenizer(), **SMALL)
    with pytest.raises(TextError, match=r"messages is a .*, not a list"):
        llm.chat(messages)
    assert_idle(llm.engine)


def test_stats_count_what_was_cached() -> None:
    llm = tiny_llm()
    before = llm.stats()
    ids = list(range(40))
    first, second = (llm.generate(ids, greedy(4))[0] for _ in range(2))
    after = llm.stats()
    assert (first.cached_tokens, second.cached_tokens) == (0, 39)
    assert after.num_prompt_tokens - before.num_prompt_tokens == 80
    assert after.num_cached_tokens - before.num_cached_tokens == 39
    assert after.num_prefill_tokens - before.num_prefill_tokens == 41
    assert after.num_output_tokens - before.num_output_tokens == 8
    assert llm.cache.tree.match_len(ids) == 40
    assert "radix tree · page size 4" in llm.cache.tree.render()
    llm.flush_cache()
    assert llm.stats().num_evictable_pages == 0
    assert llm.generate(ids, greedy(1))[0].cached_tokens == 0


def test_without_a_tokenizer_ids_do() -> None:
    with LLM(tiny_llama(), **SMALL) as llm:
        [output] = llm.generate([1, 2, 3], greedy(3))
        assert output.outputs[0].token_ids == dense_greedy([1, 2, 3], 3)
        assert output.outputs[0].text == ""
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate("text")


def test_a_folder_gives_the_same_as_its_module(tmp_path: Path) -> None:
    with LLM(write_folder(tmp_path), **(SMALL | {"max_model_len": None})) as llm:
        assert llm.engine.config.max_model_len == TINY.max_position_embeddings
        outputs = llm.generate(list(TEXTS), greedy(5))
    assert generated(outputs) == [dense_greedy(ids_of(text), 5) for text in TEXTS]


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(TypeError, match="params go with a Flax module"):
        LLM("smollm2-135m-instruct", params={})
    with pytest.raises(TypeError, match="page_sise"):
        LLM(tiny_llama(), page_sise=4)
    with pytest.raises(ValueError, match="page_size=0"):
        LLM(tiny_llama(), page_size=0)
    with pytest.raises(ValueError, match="unknown model 'no such model'"):
        LLM("no such model")


def test_a_context_manager_gives_the_pool_back() -> None:
    with new_llm(num_pages=20) as llm:
        llm.generate("a", greedy(1))
        kv = llm.engine.runner.kv
        assert not kv.is_deleted()
    assert kv.is_deleted()


def interrupt_at(call: int, run: Callable[..., Any], when: str, lose: Callable[[], None] = lambda: None) -> Any:
    """`run`, but at its `call`-th call a Ctrl-C comes before it, or after it and after `lose`."""
    num_calls = 0

    def interrupted(*args: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call and when == "before":
            signal.raise_signal(signal.SIGINT)
        result = run(*args, **named)
        if num_calls == call and when == "after":
            lose()
            signal.raise_signal(signal.SIGINT)
        return result

    return interrupted


def check_usable(llm: LLM) -> None:
    assert_idle(llm.engine)
    assert not llm.engine.has_unfinished()
    assert generated(llm.generate(list(TEXTS), greedy(8))) == [dense_greedy(ids_of(text), 8) for text in TEXTS]
    assert_idle(llm.engine)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("inside", ["sending", "reading", "between steps", "adding"])
def test_an_interrupt_leaves_the_llm_usable(monkeypatch: pytest.MonkeyPatch, inside: str, call: int, when: str) -> None:
    llm = tiny_llm()
    engine = llm.engine
    places = {
        "sending": (engine.runner, "dispatch"),
        "reading": (engine.runner, "read"),
        "between steps": (engine, "step"),
        "adding": (engine, "add_request"),
    }
    target, name = places[inside]
    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupt_at(call, getattr(target, name), when))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(list(TEXTS), greedy(8))
    check_usable(llm)


def test_an_interrupt_that_loses_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    ids = list(range(40))
    llm.generate(ids, greedy(1))
    with monkeypatch.context() as patch:
        # The step has taken the pool, and the new one has no name yet.
        patch.setattr(
            llm.engine.runner,
            "dispatch",
            interrupt_at(2, llm.engine.runner.dispatch, "after", lambda: llm.engine.runner.kv.delete()),
        )
        with pytest.raises(KeyboardInterrupt):
            llm.generate(list(TEXTS), greedy(8))
    assert llm.generate(ids, greedy(1))[0].cached_tokens == 0
    check_usable(llm)


def test_an_interrupt_between_steps_keeps_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    ids = list(range(40))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupt_at(3, llm.engine.step, "before"))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(ids, greedy(8))
    assert llm.generate(ids, greedy(1))[0].cached_tokens == 39


def test_requests_added_beside_generate_are_served_too() -> None:
    llm = tiny_llm()
    own = llm.engine.add_request(ids_of("beside"), greedy(20))
    assert generated(llm.generate(["a"], greedy(2))) == [dense_greedy(ids_of("a"), 2)]
    last = None
    while llm.engine.has_unfinished():
        [last] = llm.engine.step()
    assert last is not None
    assert (last.request_id, last.outputs[0].token_ids) == (own, dense_greedy(ids_of("beside"), 20))


def test_the_progress_bar_is_for_terminals_and_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    pipe, terminal, quick, hushed = io.StringIO(), Terminal(), Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", quick)
    monkeypatch.setattr(_ProgressBar, "PATIENCE_S", 1e9)
    llm.generate(list(TEXTS), greedy(4))
    monkeypatch.setattr(_ProgressBar, "PATIENCE_S", 0.0)
    for stream, shown in ((pipe, True), (hushed, False), (terminal, True)):
        monkeypatch.setattr(sys, "stderr", stream)
        llm.generate(list(TEXTS), greedy(4), use_tqdm=shown)
    assert pipe.getvalue() == hushed.getvalue() == quick.getvalue() == ""
    assert "generating" in terminal.getvalue()
    assert "tokens/s, hit rate" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()
