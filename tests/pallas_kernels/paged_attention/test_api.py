"""The entry to paged attention: what is computed, what is refused, and functions of one's own."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from poisoned_pool import PagedRows, poisoned_rows

from radix_jax import attention_backends
from radix_jax.pallas_kernels.paged_attention import paged_attention, register_attention_backend, write_kv
from radix_jax.pallas_kernels.paged_attention.backends import UnsupportedOption
from radix_jax.pallas_kernels.paged_attention.reference import paged_attention_reference

BACKENDS = ["auto", "xla", "pallas_interpret"]


@pytest.fixture
def rows() -> PagedRows:
    return poisoned_rows([3, 1], [2, 6], page_size=4, num_heads=4, num_kv_heads=2, head_dim=8, num_row_pads=1)


@pytest.fixture
def own_names() -> Iterator[None]:
    """What a test registers is forgotten."""
    before = dict(attention_backends._registered)
    yield
    attention_backends._registered.clear()
    attention_backends._registered.update(before)


def arguments(rows: PagedRows, **changes: Any) -> dict[str, Any]:
    arrays = ("q", "kv_pages", "page_table", "kv_lens", "cu_q_lens")
    given = {name: jnp.asarray(getattr(rows, name)) for name in arrays}
    changed = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in changes.items()}
    return given | {"page_offset": rows.page_offset, "scale": 0.3} | changed


def attend(rows: PagedRows, **changes: Any) -> Any:
    return paged_attention(**arguments(rows, **changes))


def reference(rows: PagedRows, **options: Any) -> Any:
    q = rows.q.astype(np.float64)
    return paged_attention_reference(
        q, rows.kv_pages, *rows.rows, page_offset=rows.page_offset, **({"scale": 0.3} | options)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_attention_of_the_given_scale(rows: PagedRows, backend: str) -> None:
    np.testing.assert_allclose(attend(rows, backend=backend), reference(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_option_is_passed_on(rows: PagedRows, backend: str) -> None:
    options: dict[str, Any] = {"sliding_window": 3, "logit_soft_cap": 0.7, "return_lse": True, "num_kv_heads": 2}
    scales = np.array([[2.0, 0.5], [0.25, 3.0]], np.float32)
    out, lse = attend(rows, **options, kv_scales=scales, backend=backend)
    right_out, right_lse = reference(rows, **options, kv_scales=scales)
    np.testing.assert_allclose(out, right_out, rtol=0, atol=5e-6)
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_may_be_traced(rows: PagedRows, backend: str) -> None:
    run = jax.jit(lambda offset: attend(rows, page_offset=offset, backend=backend))
    np.testing.assert_allclose(run(rows.page_offset), reference(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lanes_past_the_heads_are_nothing(rows: PagedRows, backend: str) -> None:
    rounded = np.pad(rows.kv_pages, ((0, 0), (0, 0), (0, 96)), constant_values=np.nan)
    out = attend(rows, kv_pages=rounded, num_kv_heads=2, backend=backend)
    np.testing.assert_allclose(out, reference(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_a_row_in_any_place(backend: str) -> None:
    """max_q_len=1 with rows without queries between the others, and tokens of no row behind them."""
    made = poisoned_rows([1, 1], [5, 2], page_size=4, num_heads=4, num_kv_heads=2, head_dim=8)
    empty = np.zeros((1, made.page_table.shape[1]), np.int32)
    table = np.concatenate([empty, made.page_table[:1], empty, made.page_table[1:]])
    rows = PagedRows(
        q=np.pad(made.q, ((0, 5), (0, 0), (0, 0))),
        kv_pages=made.kv_pages,
        page_table=table,
        kv_lens=np.array([0, 6, 0, 3], np.int32),
        cu_q_lens=np.array([0, 0, 1, 1, 2], np.int32),
        page_offset=made.page_offset,
        num_tokens=2,
    )
    out, lse = attend(rows, max_q_len=1, return_lse=True, backend=backend)
    right_out, right_lse = reference(rows, return_lse=True)
    np.testing.assert_allclose(out[:2], right_out[:2], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=1e-6)
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((4, 3, 8), np.float32)}, "3 q heads can't share 2 kv heads evenly"),
        ({"q": np.zeros((4, 4, 32), np.float32)}, "width 32 are no multiple of 2 [*] 32"),
        ({"num_kv_heads": 4}, "K and V of 4 heads of 8 take 64 lanes and the pool has 32"),
        (
            {"q": np.zeros((0, 4, 8), np.float32)},
            r"q is float32\[0, 4, 8\]; it must be \[T, N, H\], with no axis of length 0",
        ),
        ({"cu_q_lens": np.zeros(3, np.int32)}, "page_table has 3 rows, kv_lens 3 and cu_q_lens 3"),
        ({"page_table": np.zeros((3, 0), np.int32)}, r"page_table is int32\[3, 0\]"),
        ({"max_q_len": 0}, r"max_q_len=0 is outside \[1, 4\]"),
        ({"max_q_len": 5}, r"max_q_len=5 is outside \[1, 4\]"),
        ({"scale": float("nan")}, "scale=nan is not finite"),
        ({"sliding_window": 0}, "sliding_window=0 is below 1"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap=0.0 is not above 0"),
        ({"kv_scales": np.ones((3, 2), np.float32)}, r"kv_scales are float32\[3, 2\]; they must be float32\[2, 2\]"),
        ({"backend": "cuda"}, "attention backend 'cuda' is not one of auto, xla, pallas_gpu"),
    ],
)
def test_what_does_not_fit_is_refused(rows: PagedRows, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(rows, **changes)


def own_attention(q: Any, kv_pages: Any, page_table: Any, kv_lens: Any, cu_q_lens: Any, *, page_offset, scale) -> Any:
    return paged_attention(q, kv_pages, page_table, kv_lens, cu_q_lens, page_offset=page_offset, scale=scale)


@pytest.mark.usefixtures("own_names")
def test_a_function_of_ones_own(rows: PagedRows) -> None:
    """It gets the keywords that it knows; what it lacks is refused once it is needed."""
    register_attention_backend("mine", own_attention)
    np.testing.assert_allclose(attend(rows, backend="mine"), reference(rows), rtol=0, atol=1e-6)
    for option in ({"sliding_window": 3}, {"logit_soft_cap": 1.0}, {"return_lse": True}):
        with pytest.raises(UnsupportedOption, match=f"backend 'mine' takes no {next(iter(option))}"):
            attend(rows, backend="mine", **option)
    wide = np.pad(rows.kv_pages, ((0, 0), (0, 0), (0, 32)))
    with pytest.raises(UnsupportedOption, match="takes no num_kv_heads"):
        attend(rows, backend="mine", kv_pages=wide, num_kv_heads=2)


@pytest.mark.usefixtures("own_names")
def test_a_function_may_take_them_all(rows: PagedRows) -> None:
    seen: dict[str, Any] = {}

    def fn(*operands: Any, **options: Any) -> Any:
        seen.update(options)
        return operands[0]

    register_attention_backend("all", fn)
    attend(rows, backend="all")
    options = ("page_offset", "scale", "sliding_window", "logit_soft_cap", "return_lse", "num_kv_heads", "kv_scales")
    assert set(seen) == {*options, "max_q_len"}
    assert (seen["num_kv_heads"], seen["max_q_len"]) == (2, 4)


@pytest.mark.usefixtures("own_names")
def test_what_a_function_returns_is_checked(rows: PagedRows) -> None:
    register_attention_backend("short", lambda q, *_, **__: q[:1])
    with pytest.raises(ValueError, match=r"'short' returned float32\[1, 4, 8\]; the contract is float32\[4, 4, 8\]"):
        attend(rows, backend="short")
    register_attention_backend("short", lambda q, *_, **__: q)
    with pytest.raises(ValueError, match=r"the contract is float32\[4, 4, 8\] and float32\[4, 4\]"):
        attend(rows, backend="short", return_lse=True)


@pytest.mark.usefixtures("own_names")
def test_names_that_are_refused() -> None:
    for name in ("", "auto", "xla", "pallas_gpu", "pallas_tpu", "pallas_interpret", "pallas_tpu_interpret"):
        with pytest.raises(ValueError, match=f"name '{name}' is taken"):
            register_attention_backend(name, own_attention)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_float8_pool(backend: str, dtype: Any) -> None:
    """What is written is the value divided by its head's scale, cut to the range, and padding is dropped."""
    pool = jnp.zeros((4, 2, 32), dtype)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 8)).astype(np.float32)
    k[0, 0, 0] = 1e6
    scales = jnp.asarray([[0.5, 2.0], [1.0, 0.25]], jnp.float32)
    slots = jnp.asarray([5, 100, 0], jnp.int32)
    written = write_kv(pool, jnp.asarray(k), jnp.asarray(v), slots, page_offset=1, kv_scales=scales, backend=backend)
    values = np.asarray(written, np.float32).reshape(8, 2, 2, 8)
    largest = float(jnp.finfo(dtype).max)
    for token, slot in ((0, 7), (2, 2)):
        right = np.stack([k[token], v[token]], axis=1) / np.asarray(scales)[:, :, None]
        right = np.asarray(jnp.asarray(np.clip(right, -largest, largest), dtype), np.float32)
        np.testing.assert_array_equal(values[slot], right)
    assert not values[[0, 1, 3, 4, 5, 6]].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cap", [1e-20, 0.01, 1e4, 1e30])
def test_any_soft_cap(rows: PagedRows, cap: float, backend: str) -> None:
    """Far above the scores it changes nothing; far below, nothing but signs is left of them."""
    out = attend(rows, logit_soft_cap=cap, backend=backend)
    np.testing.assert_allclose(out, reference(rows, logit_soft_cap=cap), rtol=0, atol=2e-6)
