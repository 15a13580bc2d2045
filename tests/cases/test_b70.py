"""New weights in the process: no KV of the old ones is used for what comes after, and nothing compiles."""

import numpy as np
from compile_events import compile_events
from tiny import SMALL, VOCAB_SIZE, assert_idle, dense_greedy, drawn, finish, generate, greedy, tiny_llama

from radix_jax import Engine, EngineConfig

OLD, NEW = tiny_llama(), tiny_llama(seed=1)
PROMPT = np.arange(7, 40, dtype=np.int32)


def test_old_kv_is_never_matched_and_nothing_compiles() -> None:
    engine = Engine(OLD, None, EngineConfig(**SMALL, warmup="full"))
    fresh = Engine(NEW, None, EngineConfig(**SMALL))
    [before] = generate(engine, [PROMPT], greedy(8))
    [again] = generate(engine, [PROMPT], greedy(8))
    assert (before.cached_tokens, again.cached_tokens) == (0, len(PROMPT) - 1)
    assert before.outputs[0].token_ids == dense_greedy(PROMPT, 8, OLD)
    num_compiles = len(engine.ledger.records)

    with compile_events() as compiled:
        engine.update_params(NEW)
        [after] = generate(engine, [PROMPT], greedy(8))
        assert after.cached_tokens == 0
        rng, outputs = np.random.default_rng(0), {}
        for i in range(200):
            prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 60))
            prompt[: min(len(prompt), 20)] = PROMPT[: min(len(prompt), 20)]
            sampling = greedy(int(rng.integers(1, 5))) if i % 2 else drawn(3, i, presence_penalty=0.5, logprobs=2)
            engine.add_request(prompt, sampling)
            if i % 8 == 0:
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= finish(engine)
    assert compiled == []
    assert len(engine.ledger.records) == num_compiles
    assert [output.finished for output in outputs.values()] == [True] * 200
    assert {version for output in outputs.values() for version in output.outputs[0].weight_versions} == {1}
    assert_idle(engine)

    [expected] = generate(fresh, [PROMPT], greedy(8))
    assert after.outputs[0].token_ids == expected.outputs[0].token_ids == dense_greedy(PROMPT, 8, NEW)
    [cached] = generate(engine, [PROMPT], greedy(8))
    assert cached.cached_tokens == len(PROMPT) - 1
    assert cached.outputs[0].token_ids == after.outputs[0].token_ids
    engine.close()
    fresh.close()
