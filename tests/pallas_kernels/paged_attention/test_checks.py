"""What is refused before anything runs, with messages that say what, the rule, the numbers and the way out."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from radix_jax.pallas_kernels.paged_attention.checks import check_attention, check_write


def attention(**changes: Any) -> tuple[int, int]:
    """2 rows, 5 tokens, 4 query heads on 2 of 8 lanes."""
    given: dict[str, Any] = {
        "q": np.zeros((5, 4, 8), np.float32),
        "kv_pages": np.zeros((6, 4, 32), np.float32),
        "page_table": np.zeros((2, 3), np.int32),
        "kv_lens": np.zeros(2, np.int32),
        "cu_q_lens": np.zeros(3, np.int32),
        "page_offset": 3,
        "scale": 0.5,
        "sliding_window": None,
        "logit_soft_cap": None,
        "num_kv_heads": None,
        "kv_scales": None,
        "max_q_len": None,
    }
    return check_attention(**(given | changes))


def write(**changes: Any) -> None:
    given: dict[str, Any] = {
        "kv_pages": np.zeros((6, 4, 32), np.float32),
        "k": np.zeros((5, 2, 8), np.float32),
        "v": np.zeros((5, 2, 8), np.float32),
        "write_slots": np.zeros(5, np.int32),
        "page_offset": 3,
        "kv_scales": None,
    }
    check_write(**(given | changes))


def test_what_is_left_out_is_filled_in() -> None:
    assert attention() == (2, 5)
    wide = np.zeros((6, 4, 128), np.float32)
    assert attention(kv_pages=wide, num_kv_heads=np.int64(2), max_q_len=np.int32(1)) == (2, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_offset": jnp.int32(3)},
        {"page_offset": np.int32(0)},
        {"scale": np.float32(0.5)},
        {"scale": 1},
        {"sliding_window": np.int64(1)},
        {"logit_soft_cap": 30},
        {"q": np.zeros((5, 4, 8), jnp.bfloat16)},
        {"kv_pages": np.zeros((6, 4, 32), jnp.float8_e4m3fn)},
        {"kv_pages": np.zeros((6, 4, 32), jnp.float8_e5m2), "kv_scales": np.ones((2, 2), np.float32)},
        {"q": np.zeros((5, 4, 8), np.float16), "kv_scales": np.ones((2, 2), np.float32)},
    ],
)
def test_what_is_taken(changes: dict[str, Any]) -> None:
    assert attention(**changes) == (2, 5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": np.zeros((5, 4, 8), np.int32)},
            TypeError,
            r"q is int32\[5, 4, 8\]; its dtype must be float32 or bfloat16",
        ),
        ({"q": np.zeros((5, 4, 8))}, TypeError, r"q is float64\[5, 4, 8\]; .*: cast it"),
        ({"q": np.zeros((5, 32), np.float32)}, ValueError, r"q is float32\[5, 32\]; it must be \[T, N, H\]"),
        ({"kv_pages": np.zeros((6, 4, 32), np.int8)}, TypeError, "kv_pages is int8.* or float8_e4m3fn or float8_e5m2"),
        ({"kv_pages": np.zeros((6, 4, 2, 16), np.float32)}, ValueError, r"kv_pages is .* must be \[L \* P, K, W\]"),
        (
            {"page_table": np.zeros((2, 3), np.int64)},
            TypeError,
            r"page_table is int64\[2, 3\]; its dtype must be int32",
        ),
        ({"kv_lens": np.zeros(2, np.uint32)}, TypeError, r"kv_lens is uint32\[2\]"),
        ({"cu_q_lens": np.zeros(3, np.float32)}, TypeError, r"cu_q_lens is float32\[3\]"),
        ({"page_table": np.zeros((0, 3), np.int32)}, ValueError, r"page_table is int32\[0, 3\]; .*no axis of length 0"),
        ({"page_offset": 6}, ValueError, r"page_offset=6 is outside \[0, 6\), the pages of the pool"),
        ({"page_offset": -1}, ValueError, r"page_offset=-1 is outside \[0, 6\)"),
        ({"page_offset": 1.5}, TypeError, r"page_offset=1\.5 is neither an int nor an int32 scalar"),
        ({"page_offset": True}, TypeError, "page_offset=True is neither"),
        ({"page_offset": np.zeros(1, np.int32)}, TypeError, "page_offset=.* is neither"),
        ({"scale": float("inf")}, ValueError, "scale=inf is not finite"),
        ({"scale": jnp.float32(1)}, TypeError, "scale=.* is not a number; it is static"),
        ({"sliding_window": 2.0}, TypeError, r"sliding_window=2\.0 is not an integer"),
        ({"sliding_window": -1}, ValueError, "sliding_window=-1 is below 1, where a token sees itself alone"),
        ({"logit_soft_cap": -2.0}, ValueError, r"logit_soft_cap=-2\.0 is not above 0; leave it out for no cap"),
        ({"logit_soft_cap": float("nan")}, ValueError, "logit_soft_cap=nan is not finite"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads=0 is below 1"),
        ({"num_kv_heads": 3}, ValueError, "K and V of 3 heads of 8 take 48 lanes and the pool has 32"),
        ({"kv_scales": np.ones((2, 2))}, ValueError, r"kv_scales are float64\[2, 2\]; they must be float32\[2, 2\]"),
        ({"max_q_len": 6}, ValueError, r"max_q_len=6 is outside \[1, 5\], the tokens of the step"),
    ],
)
def test_calls_of_attention_that_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v": np.zeros((5, 2, 4), np.float32)}, ValueError, r"k is float32\[5, 2, 8\] and v is float32\[5, 2, 4\]"),
        ({"v": np.zeros((5, 2, 8), np.float16)}, ValueError, r"and v is float16\[5, 2, 8\]; they must be the same"),
        ({"write_slots": np.zeros(4, np.int32)}, ValueError, "5 tokens have 4 write_slots; give one a token"),
        ({"write_slots": np.zeros(5, np.int64)}, TypeError, r"write_slots is int64\[5\]; its dtype must be int32"),
        (
            {"kv_pages": np.zeros((6, 4, 31), np.float32)},
            ValueError,
            "take 32 lanes and the pool has 31; make it at least",
        ),
        ({"kv_scales": np.ones((2, 1), np.float32)}, ValueError, r"kv_scales are float32\[2, 1\]"),
        ({"page_offset": 7}, ValueError, r"page_offset=7 is outside \[0, 6\)"),
    ],
)
def test_writes_that_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    write()
    with pytest.raises(error, match=message):
        write(**changes)
