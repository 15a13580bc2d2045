"""An empty prompt is refused, or is one token where the tokenizer adds BOS; the engine goes on."""

from typing import Any

import pytest
from tiny import assert_idle, dense_greedy, greedy
from tiny_llm import BOS_ID, byte_tokenizer, new_llm, tiny_llm

from radix_jax.text import TextError

NEXT = [1, 2, 3]


@pytest.mark.parametrize("prompts", ["", [[]], [""], ["", []]])
def test_refused_if_no_token_results(prompts: Any) -> None:
    llm = tiny_llm()
    with pytest.raises(ValueError, match="empty prompt: a request needs at least 1 token"):
        llm.generate(prompts, greedy(2))
    assert llm.generate(NEXT, greedy(2))[0].outputs[0].token_ids == dense_greedy(NEXT, 2)
    assert_idle(llm.engine)


def test_an_empty_list_is_no_prompt_at_all() -> None:
    assert tiny_llm().generate([], greedy(2)) == []


def test_refused_among_good_ones() -> None:
    outputs = tiny_llm().generate([NEXT, "", [], NEXT], greedy(2))
    assert [output.error is not None for output in outputs] == [False, True, True, False]
    assert all(outputs[i].outputs[0].token_ids == dense_greedy(NEXT, 2) for i in (0, 3))


def test_no_messages() -> None:
    llm = tiny_llm()
    with pytest.raises(TextError, match="messages is empty; give at least one"):
        llm.chat([], greedy(2))
    assert llm.generate(NEXT, greedy(2))[0].outputs[0].token_ids == dense_greedy(NEXT, 2)


def test_one_prompt_token_if_bos_is_added() -> None:
    with new_llm(tokenizer=byte_tokenizer(add_bos=True)) as llm:
        for output in llm.generate(["", ""], greedy(2)) + llm.generate("", greedy(2)):
            assert output.prompt_token_ids == [BOS_ID]
            assert output.outputs[0].token_ids == dense_greedy([BOS_ID], 2)
        with pytest.raises(ValueError, match="empty prompt"):
            llm.generate([[]], greedy(2))
