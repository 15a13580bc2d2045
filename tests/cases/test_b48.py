"""Ids go in and come back as they are, never through text; a second turn of ids finds the first turn's KV."""

import pytest
from tiny import assert_idle, dense_greedy, greedy, tiny_llama
from tiny_llm import byte_tokenizer, new_llm

SUFFIX = [40, 41, 42]


@pytest.mark.parametrize("num_output", [1, 5, 8])
@pytest.mark.parametrize("page_size", [1, 4])
def test_second_turn_hits_the_first(page_size: int, num_output: int) -> None:
    tokenizer = byte_tokenizer(pieces=[b"ab", b"abc"])
    prompt = list(b"xabcabcab!")
    assert len(tokenizer.encode(tokenizer.decode(prompt))) < len(prompt), "text would give other ids"
    with new_llm(tiny_llama(), tokenizer, page_size=page_size) as llm:
        [first] = llm.generate(prompt, greedy(num_output, ignore_eos=True))
        output_ids = first.outputs[0].token_ids
        assert first.prompt_token_ids == prompt
        assert output_ids == dense_greedy(prompt, num_output)

        turn = prompt + output_ids + SUFFIX
        [second] = llm.generate([turn], greedy(3))
        # The last token of an output is sampled and not computed, so it has no KV.
        num_kv = len(prompt) + num_output - 1
        assert second.prompt_token_ids == turn
        assert second.cached_tokens == num_kv
        assert second.outputs[0].token_ids == dense_greedy(turn, 3)
        assert_idle(llm.engine)
