"""Over-long requests: a prompt is refused with its numbers, an output is cut to the room that the context leaves."""

from collections.abc import Iterator

import pytest
from tiny import assert_idle, dense_greedy, greedy
from tiny_llm import new_llm

from radix_jax import LLM

CONTEXT = 64


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with new_llm(max_model_len=CONTEXT) as made:
        yield made


@pytest.mark.parametrize("prompt_len", [70, 64])
@pytest.mark.parametrize("max_tokens", [1, 100])
def test_a_prompt_that_leaves_no_room_is_refused(llm: LLM, prompt_len: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"prompt of {prompt_len} tokens exceeds max_model_len=64, .*shorten it"):
        llm.generate([1] * prompt_len, greedy(max_tokens))
    assert_idle(llm.engine)


@pytest.mark.parametrize(("prompt_len", "max_tokens", "num_output"), [(60, 100, 4), (63, 100, 1), (60, 3, 3)])
def test_an_output_is_cut_to_the_room(llm: LLM, prompt_len: int, max_tokens: int, num_output: int) -> None:
    prompt = list(range(prompt_len))
    [completion] = llm.generate(prompt, greedy(max_tokens, ignore_eos=True))[0].outputs
    assert completion.token_ids == dense_greedy(prompt, num_output)
    assert completion.finish_reason == "length"


def test_a_chat_without_max_tokens(llm: LLM) -> None:
    messages = [{"role": "user", "content": "x" * 58}]
    [output] = llm.chat(messages)
    [completion] = output.outputs
    assert len(output.prompt_token_ids) == 60
    # Greedy or not, nothing fits after the fourth token; a token that ends the text may come before.
    assert len(completion.token_ids) == 4 or completion.finish_reason == "stop"
    assert completion.finish_reason in ("length", "stop")


def test_a_long_chat_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt of 72 tokens exceeds max_model_len=64"):
        llm.chat([{"role": "user", "content": "x" * 70}])
