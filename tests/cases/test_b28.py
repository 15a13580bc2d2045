"""A second call of generate on the same engine: as many outputs, in its own order, none of the first call's."""

from tiny import assert_idle, dense_greedy, greedy, random_prompts
from tiny_llm import tiny_llm


def test_two_calls_of_five_prompts() -> None:
    llm = tiny_llm()
    short, middle, long, other = (prompt.tolist() for prompt in random_prompts(4, lens=(3, 80), seed=28))
    first = [short, long, short, middle, long]
    second = [long, other, short, long, other]
    for prompts in (first, second, first[::-1]):
        outputs = llm.generate(prompts, greedy(6))
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert [output.outputs[0].token_ids for output in outputs] == [dense_greedy(prompt, 6) for prompt in prompts]
        assert len({output.request_id for output in outputs}) == 5
        assert_idle(llm.engine)
