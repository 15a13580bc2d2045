"""The entry to paged attention: which implementation is chosen, and what is refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from poisoned_pool import PagedRows, poisoned_rows

from radix_jax.pallas_kernels.paged_attention import attention_backend, paged_attention
from radix_jax.pallas_kernels.paged_attention.reference import paged_attention_reference


@pytest.fixture
def rows() -> PagedRows:
    return poisoned_rows([3, 1], [2, 6], page_size=4, num_heads=4, num_kv_heads=2, head_dim=8, num_row_pads=1)


def attend(rows: PagedRows, **changes: Any) -> np.ndarray:
    args: dict[str, Any] = {
        "q": jnp.asarray(rows.q),
        "kv_pages": jnp.asarray(rows.kv_pages),
        "page_table": jnp.asarray(rows.page_table),
        "kv_lens": jnp.asarray(rows.kv_lens),
        "cu_q_lens": jnp.asarray(rows.cu_q_lens),
        "page_offset": rows.page_offset,
        "scale": 0.3,
        "max_q_len": len(rows.q),
    }
    return np.asarray(paged_attention(**(args | changes)))


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_it_is_attention_of_the_given_scale(rows: PagedRows, backend: str) -> None:
    reference = paged_attention_reference(
        rows.q.astype(np.float64), rows.kv_pages, *rows.rows, page_offset=rows.page_offset, scale=0.3
    )
    np.testing.assert_allclose(attend(rows, backend=backend), reference, rtol=0, atol=1e-6)


def test_the_choice_has_a_reason() -> None:
    assert attention_backend("xla") == ("xla", "asked for")
    backend, reason = attention_backend("auto")
    assert backend == "xla"
    assert "cpu" in reason


@pytest.mark.parametrize("backend", ["pallas_gpu", "pallas_tpu", "pallas_interpret"])
def test_what_is_not_built_names_itself(rows: PagedRows, backend: str) -> None:
    with pytest.raises(NotImplementedError, match=f"attention_backend='{backend}' is not built yet; use auto or xla"):
        attention_backend(backend)
    with pytest.raises(NotImplementedError, match=backend):
        attend(rows, backend=backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((4, 3, 8), np.float32)}, "3 q heads of 8 can't share pool lanes of width 32"),
        ({"q": np.zeros((4, 4, 32), np.float32)}, "4 q heads of 32 can't share pool lanes of width 32"),
        ({"cu_q_lens": np.zeros(3, np.int32)}, "page_table has 3 rows, kv_lens 3 and cu_q_lens 3"),
        ({"max_q_len": 0}, r"max_q_len=0 is outside \[1, 4\]"),
        ({"max_q_len": 5}, r"max_q_len=5 is outside \[1, 4\]"),
    ],
)
def test_shapes_that_do_not_fit(rows: PagedRows, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(rows, **{name: jnp.asarray(v) if isinstance(v, np.ndarray) else v for name, v in changes.items()})
