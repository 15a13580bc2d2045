"""Stop strings are not built yet: setting one says so, and a stop text in the prompt is text like any other."""

import pytest
from tiny import dense_greedy, greedy
from tiny_llm import tiny_llm

from radix_jax import SamplingParams


@pytest.mark.parametrize("stop", ["END_OF", ["END_OF"], ("END_OF", "tail")])
def test_a_stop_string_is_refused_by_name(stop: object) -> None:
    with pytest.raises(NotImplementedError, match=r"SamplingParams\.stop=.*END_OF.* is not built yet"):
        SamplingParams(stop=stop)  # type: ignore[arg-type]


@pytest.mark.parametrize("nothing", [None, (), [], ""])
def test_no_stop_string_is_fine(nothing: object) -> None:
    assert not SamplingParams(stop=nothing).stop  # type: ignore[arg-type]


def test_the_prompt_is_not_searched() -> None:
    prompt = "END_OF_DOC tail"
    [output] = tiny_llm().generate(prompt, greedy(6))
    assert output.outputs[0].token_ids == dense_greedy(list(prompt.encode()), 6)
