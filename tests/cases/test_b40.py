"""Parts of a stop string that reach the client: none may, with streaming and without; the prompt is not searched."""

import pytest
from tiny import SMALL, following_llama, greedy
from tiny_llm import byte_tokenizer

from radix_jax import LLM
from radix_jax.text import StopText

PIECES = ["Sure", " EN", "D_", "OF", "_DOC", " tail"]
FIRST = 256  # their ids come after the 256 bytes
STOP = "END_OF"


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Says the pieces, one after the other, whatever the text before them."""
    tokenizer = byte_tokenizer(pieces=[piece.encode() for piece in PIECES])
    following = [FIRST] * tokenizer.vocab_size
    following[FIRST : FIRST + len(PIECES) - 1] = range(FIRST + 1, FIRST + len(PIECES))
    return LLM(following_llama(following), tokenizer=tokenizer, **SMALL)


def test_the_text_ends_in_front_of_it(llm: LLM) -> None:
    whole, stopped = llm.generate(["Hi", "Hi"], [greedy(6), greedy(6, stop=STOP)])
    assert whole.outputs[0].text == "".join(PIECES)
    [completion] = stopped.outputs
    assert completion.text == "Sure "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", STOP)
    assert completion.token_ids == [FIRST, FIRST + 1, FIRST + 2, FIRST + 3], "with the one that completed it"


def test_streamed(llm: LLM) -> None:
    text, pieces, ends = StopText(llm.tokenizer, [STOP]), [], []
    prompt = llm.tokenizer.encode("Hi")
    for state in llm.engine.stream(prompt, greedy(6, stop=STOP), finish_check=lambda _, ids: text.push(ids)):
        pieces.append(text.take())
        ends.append((state.outputs[0].finish_reason, state.outputs[0].stop_reason))
    pieces.append(text.finish())
    assert pieces == ["Sure", " ", "", "", ""]
    assert ends == [(None, None)] * 3 + [("stop", STOP)]


def test_the_prompt_is_not_searched(llm: LLM) -> None:
    for prompt in (STOP, "the END_O"):
        ids = list(prompt.encode())
        [output] = llm.generate(ids, greedy(1, stop=[STOP, f"{prompt[-1]}Sure"]))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("Sure", "length")
