"""A seed gives the same text whatever the batch, the row, the order and the cache; other seeds give others."""

import dataclasses

import numpy as np
from tiny import generate, samples, tiny_engine, token_ids

from radix_jax import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
SEEDS = (7, 8, 7 + 2**32, 2**63 - 1)


def drawn(seed: int | None, max_tokens: int = 30, **fields: float) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed, **fields)


def test_seeds_are_repeated_in_any_company() -> None:
    engine = tiny_engine()
    alone = [token_ids(generate(engine, [PROMPT], drawn(seed)))[0] for seed in SEEDS]
    assert len({tuple(ids) for ids in alone}) == len(SEEDS)
    together = token_ids(generate(engine, [PROMPT] * 4, [drawn(seed) for seed in SEEDS]))
    assert together == alone
    reversed_order = token_ids(generate(engine, [PROMPT] * 4, [drawn(seed) for seed in SEEDS[::-1]]))
    assert reversed_order == alone[::-1]
    # Among others that are greedy, filtered, longer, and end early.
    others = [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=2.0, top_k=5, top_p=0.5, seed=1, max_tokens=3),
        SamplingParams(temperature=0.7, min_p=0.1, max_tokens=1),
    ]
    prompts = [np.arange(70), PROMPT, [1, 2, 3], [3] * 50, PROMPT, PROMPT, PROMPT]
    params = [others[0], drawn(SEEDS[0]), others[1], others[2], *(drawn(seed) for seed in SEEDS[1:])]
    ids = token_ids(generate(engine, prompts, params))
    assert [ids[1], *ids[4:]] == alone
    uncached = tiny_engine(enable_prefix_cache=False)
    assert token_ids(generate(uncached, [PROMPT] * 4, [drawn(seed) for seed in SEEDS])) == alone


def test_a_filtered_draw_is_repeated_too() -> None:
    engine = tiny_engine()
    params = drawn(7, top_p=0.8, min_p=0.01)
    [alone] = token_ids(generate(engine, [PROMPT], params))
    assert token_ids(generate(engine, [[4, 4], PROMPT, PROMPT], [drawn(9), params, drawn(7)]))[1] == alone


def test_a_shorter_output_is_the_beginning_of_a_longer_one() -> None:
    engine = tiny_engine()
    [long, short] = token_ids(generate(engine, [PROMPT] * 2, [drawn(7), drawn(7, 10)]))
    assert short == long[:10]


def test_requests_without_a_seed_differ_from_each_other() -> None:
    engine = tiny_engine()
    outputs = token_ids(generate(engine, [PROMPT] * 4, drawn(None)))
    assert len({tuple(ids) for ids in outputs}) == 4


def test_four_samples_of_one_seed() -> None:
    """Not all equal, the same four in the same order again, and no sibling stops when the first one ends."""
    engine = tiny_engine()
    before = engine.stats()
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=7, n=4)
    [first], [again] = generate(engine, [PROMPT], params), generate(engine, [PROMPT], params)
    ids = samples(first)
    assert len({tuple(each) for each in ids}) == 4
    assert samples(again) == ids
    assert [each.finish_reason for each in first.outputs] == ["length"] * 4
    assert engine.stats().num_prompt_tokens - before.num_prompt_tokens == 2 * len(PROMPT)
    # Sample 2 is scripted to end at its fifth token, which no other one says in its first thirty.
    [stop_id] = {ids[2][4]} - {token_id for index in (0, 1, 3) for token_id in ids[index]} - set(ids[2][:4])
    [ended] = generate(engine, [PROMPT], dataclasses.replace(params, stop_token_ids=[stop_id]))
    assert samples(ended) == [ids[0], ids[1], ids[2][:5], ids[3]]
    assert [each.finish_reason for each in ended.outputs] == ["length", "length", "stop", "length"]
    assert ended.prompt_token_ids == PROMPT
