"""Sleep gives the device memory of pool and sampler state away, and wake takes it back, compiling nothing."""

import gc
from typing import Any

import jax
import pytest
from compile_events import compile_events
from tiny import SMALL, assert_idle, dense_greedy, drawn, generate, greedy, share_programs, tiny_llama

from radix_jax import LLM, Engine, EngineConfig

PROMPT = list(range(40, 60))


@pytest.fixture
def engine() -> Engine:
    return share_programs(Engine(tiny_llama(), None, EngineConfig(**SMALL)))


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def bytes_of(*arrays: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def test_memory_goes_and_comes_back_and_nothing_compiles(engine: Engine) -> None:
    [before] = generate(engine, [PROMPT], greedy(5))
    generate(engine, [PROMPT], drawn(5, 0, presence_penalty=1.0))
    given = [engine.runner.kv, *jax.tree.leaves(engine.runner.sampler_state)]
    num_bytes, num_live = bytes_of(given), live_bytes()
    num_compiles = len(engine.ledger.records)
    engine.sleep()
    engine.sleep()
    assert all(array.is_deleted() for array in given)
    assert live_bytes() == num_live - num_bytes
    assert engine.cache.tree.total_size == 0
    assert_idle(engine)
    with compile_events() as compiled:
        engine.wake()
        engine.wake()
        assert live_bytes() == num_live
        [after] = generate(engine, [PROMPT], greedy(5))
        [penalised] = generate(engine, [PROMPT], drawn(5, 0, presence_penalty=1.0))
    assert compiled == []
    assert len(engine.ledger.records) == num_compiles
    assert after.cached_tokens == 0
    assert after.outputs == before.outputs
    assert len(penalised.outputs[0].token_ids) == 5


def test_asleep_it_takes_nothing_but_new_params(engine: Engine) -> None:
    new = tiny_llama(seed=1)
    engine.sleep()
    for call in (lambda: engine.add_request(PROMPT), engine.step, lambda: engine.stream(PROMPT)):
        with pytest.raises(RuntimeError, match=r"the engine is asleep and has no memory for KV; call wake\(\) first"):
            call()
    assert engine.unfinished == frozenset()
    engine.flush_cache()
    engine.update_params(new)
    assert engine.runner.kv.is_deleted()
    engine.wake()
    [output] = generate(engine, [PROMPT], greedy(5))
    assert output.outputs[0].token_ids == dense_greedy(PROMPT, 5, new)
    assert output.outputs[0].weight_versions == [1] * 5


def test_unfinished_requests_keep_it_awake(engine: Engine) -> None:
    engine.add_request(PROMPT, greedy(9))
    engine.step()
    engine.add_request(PROMPT, greedy(9))
    with pytest.raises(RuntimeError, match="1 running and 1 waiting requests use the cache; finish or abort them"):
        engine.sleep()
    engine.update_params(tiny_llama(seed=1), on_update="abort")
    for request_id in engine.unfinished:
        engine.abort(request_id)
    with pytest.raises(RuntimeError, match=r"1 outputs wait for the next step\(\); take them first"):
        engine.sleep()
    engine.step()
    engine.sleep()
    engine.close()
    assert engine.runner.kv.is_deleted()


def test_it_stays_asleep_where_memory_is_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.sleep()

    def short() -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_new_state", short)
        with pytest.raises(MemoryError):
            engine.wake()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    engine.wake()
    [output] = generate(engine, [PROMPT], greedy(3))
    assert output.outputs[0].token_ids == dense_greedy(PROMPT, 3)


def test_an_interrupted_update_leaves_it_asleep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.sleep()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "replace_params", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_params(tiny_llama(seed=1))
    assert engine.runner.kv.is_deleted()
    assert engine.weight_version == 0
    engine.wake()
    [output] = generate(engine, [PROMPT], greedy(3))
    assert output.outputs[0].token_ids == dense_greedy(PROMPT, 3)


def test_an_llm_sleeps_and_wakes() -> None:
    with LLM(tiny_llama(), **SMALL) as llm:
        share_programs(llm.engine)
        llm.sleep()
        assert llm.engine.runner.kv.is_deleted()
        llm.wake()
        assert llm.generate([PROMPT], greedy(3))[0].outputs[0].token_ids == dense_greedy(PROMPT, 3)
