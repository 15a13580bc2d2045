"""From a cold cache, lpm and dfs-weight compute each edge of the prompts' trie once, in whatever order they arrive."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, num_trie_edges

POLICIES = ("lpm", "dfs-weight")
# Prompts are made of few words, so that they share beginnings, often of whole pages.
WORDS = tuple(tuple(range(10 * i, 10 * i + length)) for i, length in enumerate((1, 3, 4, 8, 16)))
PROMPTS = st.lists(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(lambda words: [id for word in words for id in word]),
    min_size=1,
    max_size=12,
)


def ends_of_their_own(prompts: list[list[int]]) -> list[list[int]]:
    """So that none is the beginning of another."""
    return [[*prompt, 1000 + i] for i, prompt in enumerate(prompts)]


def num_prefill_tokens(
    prompts: list[list[int]],
    *,
    page_size: int,
    num_pages: int,
    max_running_requests: int,
    max_tokens: int,
    policy: str,
    partial_pages: bool = False,
    chunk_len: int = 256,
) -> int:
    scheduler = make_scheduler(
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=max_running_requests,
        max_prefill_tokens=chunk_len,
        schedule_policy=policy,
        partial_pages=partial_pages,
    )
    make = RequestMaker()
    requests = [make(prompt, max_tokens) for prompt in prompts]
    for request in requests:
        scheduler.add(request)
    finished = Ahead(scheduler, FakeModel(num_pages, page_size)).run_all()
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
    stats = scheduler.stats
    assert stats.num_prefill_tokens == sum(map(len, prompts)) - stats.num_cached_tokens
    return stats.num_prefill_tokens


def pages_of_longest(prompts: list[list[int]], max_tokens: int, page_size: int) -> int:
    """Pages, the null page included, that just hold the longest request."""
    return 1 + -(-(max(map(len, prompts)) + max_tokens - 1) // page_size)


@given(
    prompts=PROMPTS,
    page_size=st.sampled_from((1, 2, 4, 16)),
    policy=st.sampled_from(POLICIES),
    max_tokens=st.sampled_from((1, 1, 5)),
    num_spare_pages=st.sampled_from((0, 0, 1, 3)),
    chunk_len=st.sampled_from((16, 256)),
)
@settings(max_examples=100)
@pytest.mark.slow
def test_one_after_the_other_in_a_pool_that_just_holds_the_longest(
    prompts: list[list[int]], page_size: int, policy: str, max_tokens: int, num_spare_pages: int, chunk_len: int
) -> None:
    prompts = ends_of_their_own(prompts)
    num_pages = pages_of_longest(prompts, max_tokens, page_size) + num_spare_pages
    assert num_prefill_tokens(
        prompts,
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=1,
        max_tokens=max_tokens,
        policy=policy,
        chunk_len=chunk_len,
    ) == num_trie_edges(prompts, page_size)


@given(
    prompts=PROMPTS,
    page_size=st.sampled_from((1, 2, 4, 16)),
    policy=st.sampled_from((*POLICIES, "fcfs", "random")),
    max_running_requests=st.integers(1, 8),
    chunk_len=st.integers(16, 60),
)
@settings(max_examples=60)
def test_many_together_in_an_ample_pool(
    prompts: list[list[int]], page_size: int, policy: str, max_running_requests: int, chunk_len: int
) -> None:
    """Where nothing is ever evicted, the order does not matter."""
    prompts = ends_of_their_own(prompts)
    assert num_prefill_tokens(
        prompts,
        page_size=page_size,
        num_pages=1 + sum(-(-len(prompt) // page_size) + 3 for prompt in prompts),
        max_running_requests=max_running_requests,
        max_tokens=3,
        policy=policy,
        chunk_len=chunk_len,
    ) == num_trie_edges(prompts, page_size)


@given(
    prompts=PROMPTS,
    page_size=st.sampled_from((2, 4, 16)),
    policy=st.sampled_from(POLICIES),
    max_running_requests=st.sampled_from((1, 1, 3, 8)),
    is_ample=st.booleans(),
    max_tokens=st.sampled_from((1, 3)),
)
@settings(max_examples=100)
@pytest.mark.slow
def test_with_partial_pages_between_that_and_the_edges_by_tokens(
    prompts: list[list[int]],
    page_size: int,
    policy: str,
    max_running_requests: int,
    is_ample: bool,
    max_tokens: int,
) -> None:
    prompts = ends_of_their_own(prompts)
    num_pages = 1 + sum(-(-len(prompt) // page_size) + 3 for prompt in prompts)
    if not is_ample:
        max_running_requests, num_pages = 1, pages_of_longest(prompts, max_tokens, page_size)
    num_tokens = num_prefill_tokens(
        prompts,
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=max_running_requests,
        max_tokens=max_tokens,
        policy=policy,
        partial_pages=True,
    )
    assert num_trie_edges(prompts, 1) <= num_tokens <= num_trie_edges(prompts, page_size)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_a_deep_tree_of_81_prompts_shuffled(policy: str, seed: int) -> None:
    """Four levels of 16 tokens with three branches each; the pool holds one path."""
    rng = np.random.default_rng(seed)
    prompts = [
        [*[a] * 16, *[10 + b] * 16, *[20 + c] * 16, *[30 + d] * 5]
        for a in range(3)
        for b in range(3)
        for c in range(3)
        for d in range(3)
    ]
    rng.shuffle(prompts)
    num_tokens = num_prefill_tokens(
        prompts, page_size=16, num_pages=5, max_running_requests=1, max_tokens=1, policy=policy
    )
    assert num_tokens == num_trie_edges(prompts, 16) == 16 * (3 + 9 + 27) + 5 * 81


def test_first_come_first_served_is_not_optimal_there() -> None:
    """So that the equality above is not one of the pool."""
    prompts = [[*[a] * 16, b] for b in range(3) for a in range(3)]
    fields = {"page_size": 16, "num_pages": 3, "max_running_requests": 1, "max_tokens": 1}
    assert num_prefill_tokens(prompts, policy="fcfs", **fields) == 9 * 17
    for policy in POLICIES:
        assert num_prefill_tokens(prompts, policy=policy, **fields) == 3 * 16 + 9
