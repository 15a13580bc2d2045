"""The four benchmark workloads compute no prompt token twice: their prefill counts are the minimum, at page_size 1."""

import pytest
from scheduling import FakeModel, RequestMaker, make_scheduler, run_all

from benchmarks.workloads import WORKLOADS, waves
from radix_jax.scheduler import RequestState

NUM_PAGES = 16_385


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "shortest-prefill-first"])
@pytest.mark.parametrize(
    ("name", "minimum"), [("shared", 2_560), ("multiturn", 2_344), ("noshare", 8_192), ("tree", 8_160)]
)
def test_prefill_is_minimal(name: str, minimum: int, policy: str) -> None:
    scheduler = make_scheduler(
        num_pages=NUM_PAGES, max_running_requests=64, max_prefill_tokens=2048, schedule_policy=policy
    )
    model, make = FakeModel(NUM_PAGES, 1), RequestMaker()
    done: dict[int, RequestState] = {}
    for wave in waves(WORKLOADS[name]()):
        for segment in wave:
            prompt: list[int] = []
            if segment.parent is not None:
                parent = done[segment.parent]
                prompt = parent.tokens[
                    : parent.num_tokens if segment.parent_gen else parent.request.prompt_len
                ].tolist()
            scheduler.add(make([*prompt, *segment.ids], segment.max_new, request_id=str(segment.id)))
        done |= {int(request_id): state for request_id, state in run_all(scheduler, model).items()}
    scheduler.check_integrity()
    assert len(done) == len(WORKLOADS[name]())
    assert scheduler.stats.num_prefill_tokens == minimum
    assert scheduler.stats.num_prompt_tokens == scheduler.stats.num_cached_tokens + minimum
