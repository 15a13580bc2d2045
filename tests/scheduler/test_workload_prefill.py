"""The four benchmark workloads compute no prompt token twice: their prefill counts are the minimum, at page_size 1 and,
with partial pages, at 16."""

import pytest
from scheduling import FakeModel, RequestMaker, make_scheduler, run_all

from benchmarks.workloads import WORKLOADS, waves
from radix_jax.scheduler import RequestState

NUM_TOKENS = 16_384


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "shortest-prefill-first"])
@pytest.mark.parametrize(
    ("name", "minimum"), [("shared", 2_560), ("multiturn", 2_344), ("noshare", 8_192), ("tree", 8_160)]
)
def test_prefill_is_minimal(name: str, minimum: int, policy: str) -> None:
    assert num_prefill_tokens(name, 1, policy) == minimum


@pytest.mark.parametrize(
    ("name", "whole_pages", "minimum"),
    [("shared", 2_560, 2_560), ("multiturn", 2_944, 2_344), ("noshare", 8_192, 8_192), ("tree", 8_160, 8_160)],
)
def test_partial_pages_make_it_minimal_at_page_size_16(name: str, whole_pages: int, minimum: int) -> None:
    assert num_prefill_tokens(name, 16, "lpm", partial_pages=False) == whole_pages
    assert num_prefill_tokens(name, 16, "lpm") == minimum


def num_prefill_tokens(name: str, page_size: int, policy: str, *, partial_pages: bool = True) -> int:
    num_pages = NUM_TOKENS // page_size + 1
    scheduler = make_scheduler(
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=64,
        max_prefill_tokens=2048,
        schedule_policy=policy,
        partial_pages=partial_pages,
    )
    model, make = FakeModel(num_pages, page_size), RequestMaker()
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
    stats = scheduler.stats
    assert stats.num_prompt_tokens == stats.num_cached_tokens + stats.num_prefill_tokens
    return stats.num_prefill_tokens
