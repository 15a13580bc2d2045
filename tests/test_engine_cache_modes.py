"""`cache` of a request, on the device: same tokens always, exact hits, and exactly what is left in the tree."""

import pytest
from tiny import (
    SMALL,
    assert_idle,
    dense_greedy,
    finish,
    generate,
    greedy,
    random_prompts,
    samples,
    share_programs,
    tiny_engine,
    tiny_llama,
)
from tiny_llm import tiny_llm

from radix_jax import Engine, EngineConfig
from radix_jax.request import CACHE_MODES

[PROMPT] = random_prompts(1, lens=(42, 43), seed=70)
WARM_LEN = 30


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("page_size", "partial_pages"),
    [(4, True), (4, False), *(pytest.param(*case, marks=SLOW) for case in ((1, True), (16, True), (16, False)))],
)
def test_tokens_hits_and_pages(page_size: int, partial_pages: bool) -> None:
    fields = SMALL | {"page_size": page_size, "partial_pages": partial_pages, "max_prefill_tokens": 32}
    engine = share_programs(Engine(tiny_llama(), None, EngineConfig(**fields)))
    expected = dense_greedy(PROMPT, 4)
    for mode in CACHE_MODES:
        for n in (1, 3):
            engine.flush_cache()
            generate(engine, [PROMPT[:WARM_LEN]], greedy(1))
            before = engine.stats().num_evictable_pages
            request_id = engine.add_request(PROMPT, greedy(4, n=n), cache=mode)
            output = finish(engine)[request_id]
            assert samples(output) == [expected] * n
            hit_len = WARM_LEN if partial_pages else WARM_LEN // page_size * page_size
            assert output.cached_tokens == (hit_len if mode in ("use", "read") else 0)
            assert_idle(engine)
            left_len = len(PROMPT) + 3 if mode in ("use", "write") else WARM_LEN
            assert engine.cache.tree.total_size == left_len // page_size * page_size
            if mode in ("off", "read"):
                assert engine.stats().num_evictable_pages == before


@pytest.mark.parametrize("mixed_steps", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_modes_at_once_in_a_pool_that_is_too_small(overlap: bool, mixed_steps: bool) -> None:
    fields = SMALL | {"num_pages": 32, "max_prefill_tokens": 32, "overlap": overlap, "mixed_steps": mixed_steps}
    engine = share_programs(Engine(tiny_llama(), None, EngineConfig(**fields)))
    prompts = random_prompts(2, lens=(30, 50), num_stems=1, seed=71)
    ids = {}
    for prompt in prompts:
        for mode in CACHE_MODES:
            ids[engine.add_request(prompt, greedy(30, n=2), cache=mode)] = prompt
    outputs = finish(engine)
    expected = {prompt.tobytes(): dense_greedy(prompt, 30) for prompt in prompts}
    for request_id, prompt in ids.items():
        assert samples(outputs[request_id]) == [expected[prompt.tobytes()]] * 2
    assert engine.stats().num_retractions > 0
    assert_idle(engine)
    assert {node.namespace for node in engine.cache.tree.snapshot().nodes} == {None}


def test_a_stream_and_an_llm_take_it_too() -> None:
    engine = tiny_engine()
    for mode, hits in (("off", [0, 0]), ("write", [0, 0]), ("read", [41, 41]), ("use", [41, 41])):
        for hit_len in hits:
            last = list(engine.stream(PROMPT, greedy(2), cache=mode))[-1]
            assert (last.cached_tokens, samples(last)) == (hit_len, [dense_greedy(PROMPT, 2)])
    llm = tiny_llm()
    text = "the same words, over and over again"
    for mode, hit_len in (("off", 0), ("write", 0), ("read", len(text) - 1)):
        [output] = llm.generate(text, greedy(2), cache=mode)
        assert output.cached_tokens == hit_len
    messages = [{"role": "user", "content": text}]
    llm.chat(messages, greedy(2), cache="off")
    [output] = llm.chat(messages, greedy(2), cache="off")
    assert output.cached_tokens == 0


@pytest.mark.parametrize("mode", ["on", "", "USE"])
def test_another_mode_is_refused(mode: str) -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match="is not one of 'use', 'off', 'read', 'write'"):
        engine.add_request([1, 2], cache=mode)
    with pytest.raises(ValueError, match="is not one of 'use', 'off', 'read', 'write'"):
        tiny_llm().generate("x", cache=mode)
    assert_idle(engine)
