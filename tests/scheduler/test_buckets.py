"""Few shapes, each the smallest that holds a step, and every possible step held."""

import pytest

from radix_jax.plan import Bucket
from radix_jax.scheduler import Buckets


def buckets(*, rows: int = 64, tokens: int = 2048, page_size: int = 16, max_model_len: int = 4096) -> Buckets:
    return Buckets(
        page_size=page_size, max_model_len=max_model_len, max_running_requests=rows, max_prefill_tokens=tokens
    )


def test_the_set_is_small_and_known() -> None:
    assert buckets(rows=20, tokens=200, max_model_len=100).all() == (
        Bucket("decode", 8, 8, 7),
        Bucket("decode", 16, 16, 7),
        Bucket("decode", 32, 32, 7),
        Bucket("prefill", 64, 8, 7),
        Bucket("prefill", 64, 32, 7),
        Bucket("prefill", 128, 8, 7),
        Bucket("prefill", 128, 32, 7),
        Bucket("prefill", 256, 8, 7),
        Bucket("prefill", 256, 32, 7),
    )
    assert len(buckets().all()) == 16


def test_tiny_limits_give_one_bucket_a_kind() -> None:
    assert buckets(rows=1, tokens=1, page_size=1, max_model_len=5).all() == (
        Bucket("decode", 8, 8, 5),
        Bucket("prefill", 64, 8, 5),
    )


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (5, 100), (8, 64), (9, 65), (64, 2048)])
def test_each_possible_step_gets_the_smallest_bucket_that_holds_it(rows: int, tokens: int) -> None:
    some = buckets(rows=rows, tokens=tokens)
    for num_rows in range(1, rows + 1):
        held = [bucket for bucket in some.all() if bucket.kind == "decode" and bucket.num_rows >= num_rows]
        assert some.for_decode(num_rows) == min(held, key=lambda bucket: bucket.num_rows)
    for num_tokens in {1, tokens // 2, tokens - 1, tokens} - {0}:
        for num_rows in range(1, min(rows, num_tokens) + 1):
            bucket = some.for_prefill(num_tokens, num_rows)
            assert bucket in some.all()
            assert bucket.num_tokens >= num_tokens
            assert bucket.num_rows >= num_rows
            assert bucket.num_tokens < 2 * num_tokens or bucket.num_tokens == 64
            assert bucket.num_rows == 8 or num_rows > 8


def test_a_step_beyond_the_largest_bucket_is_refused_with_numbers() -> None:
    some = buckets(rows=8, tokens=64)
    with pytest.raises(ValueError, match=r"decode step of 9 tokens in 9 rows .* 8 tokens in 8 rows"):
        some.for_decode(9)
    with pytest.raises(ValueError, match=r"prefill step of 65 tokens in 1 rows .* 64 tokens in 8 rows"):
        some.for_prefill(65, 1)


@pytest.mark.parametrize("name", ["page_size", "max_model_len", "max_running_requests", "max_prefill_tokens"])
def test_limits_start_at_one(name: str) -> None:
    limits = {"page_size": 1, "max_model_len": 1, "max_running_requests": 1, "max_prefill_tokens": 1}
    with pytest.raises(ValueError, match=rf"{name}=0 is below its least value 1"):
        Buckets(**{**limits, name: 0})
