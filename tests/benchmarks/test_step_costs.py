"""The costs of a replay can be measured on any engine."""

import pytest
from tiny import generate, greedy, random_prompts, tiny_engine

from benchmarks.step_costs import StepTimer, relative_error
from radix_jax.replay import CostModel


def test_every_step_is_counted_and_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(overlap=False)
    engine.flush_cache()
    for name in ("dispatch", "read"):
        monkeypatch.setattr(engine.runner, name, getattr(engine.runner, name))  # put back when the test ends
    before, timer = engine.stats(), StepTimer(engine)
    generate(engine, random_prompts(6, lens=(5, 60), seed=3), greedy(6))
    after = engine.stats()
    assert len(timer.measured) == sum(
        getattr(after, name) - getattr(before, name) for name in ("num_prefill_steps", "num_decode_steps")
    )
    counts = [counts for counts, _ in timer.measured]
    assert sum(one.num_prefill_tokens for one in counts) == after.num_prefill_tokens - before.num_prefill_tokens
    # The first token of each comes from its prompt.
    assert sum(one.num_decode_rows for one in counts) == 6 * 5
    assert all(seconds_s > 0 for _, seconds_s in timer.measured)
    assert 0 <= relative_error(CostModel.fit(timer.measured), timer.measured) < 2


def test_overlapped_steps_are_not_timed() -> None:
    with pytest.raises(ValueError, match="time an engine with overlap=False"):
        StepTimer(tiny_engine())
