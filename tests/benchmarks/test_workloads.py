"""The workloads are the same numbers for every engine, so they are pinned down to the bit."""

import hashlib
import json

import pytest

from benchmarks.workloads import WORKLOADS, WorkloadStats, multiturn, stats, tree, waves

EXPECTED = {
    "shared": (WorkloadStats(requests=64, prompt_tokens=34816, output_tokens=2048, min_prefill=2560), 1),
    "multiturn": (WorkloadStats(requests=48, prompt_tokens=11904, output_tokens=1536, min_prefill=2344), 6),
    "noshare": (WorkloadStats(requests=32, prompt_tokens=8192, output_tokens=1024, min_prefill=8192), 1),
    "tree": (WorkloadStats(requests=85, prompt_tokens=30048, output_tokens=1360, min_prefill=8160), 4),
}
DIGESTS = {
    "shared": "8d034df9c2641b80",
    "multiturn": "65d0c7b47b5665c5",
    "noshare": "2e3aa105ea6936fe",
    "tree": "045269e1c6b2f6c8",
}


def digest(name: str) -> str:
    """Of every number of a workload."""
    rows = [[row.id, row.conv, row.parent, row.parent_gen, row.wave, row.ids, row.max_new] for row in WORKLOADS[name]()]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", WORKLOADS)
def test_sizes(name: str) -> None:
    expected_stats, num_waves = EXPECTED[name]
    requests = WORKLOADS[name]()
    assert stats(requests) == expected_stats
    assert len(waves(requests)) == num_waves
    assert [request.id for request in requests] == list(range(len(requests)))


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_number_is_pinned(name: str) -> None:
    assert digest(name) == DIGESTS[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_parents_belong_to_the_wave_before(name: str) -> None:
    requests = WORKLOADS[name]()
    for request in requests:
        assert (request.parent is None) == (request.wave == 0)
        if request.parent is not None:
            assert requests[request.parent].wave == request.wave - 1
            assert requests[request.parent].conv == request.conv


def test_shared_prompts_agree_for_512_tokens() -> None:
    prompts = [request.ids for request in WORKLOADS["shared"]()]
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[:513] for prompt in prompts}) == len(prompts)


def test_minimum_of_a_turn_counts_the_last_generated_token() -> None:
    two_turns = multiturn(conversations=1, turns=2, user=10, max_new=5)
    assert stats(two_turns).min_prefill == 10 + 1 + 10


def test_minimum_of_a_tree_is_its_segments() -> None:
    nodes = tree(levels=2, fan=3, segment=7)
    assert stats(nodes).min_prefill == 7 * (1 + 3 + 9)
