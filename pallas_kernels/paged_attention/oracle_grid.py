"""The cases that every form of paged attention is proved on, as data: `GRID`.

A case is small, so that a kernel which is interpreted on a CPU runs through all of them in a minute or two. Whatever no
row wrote is NaN or infinite: the null page, the other layer, slots behind a row's end, lanes past the heads.
`case_inputs` builds the arrays of a case, `expected` what is right (plain numpy in float64), `tolerance` how far
rounding may move it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from radix_jax.pallas_kernels.paged_attention.reference import paged_attention_reference

NUM_LAYERS = 2
MAX_KV_SCALE = 2.0
_POISON = (np.nan, np.inf, -np.inf)
# (tokens to compute, tokens cached in front of them) of each row.
Lens = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PagedRows:
    """What `paged_attention` takes, as numpy; see there. num_tokens: tokens of real rows, those behind are padding."""

    q: np.ndarray
    kv_pages: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    page_offset: int
    num_tokens: int
    kv_scales: np.ndarray | None = None

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.page_table, self.kv_lens, self.cu_q_lens


@dataclass(frozen=True)
class OracleCase:
    """One call of `paged_attention`.

    lens: (tokens to compute, tokens cached in front of them) of each row. decode: max_q_len is 1; else it is T.
    scale: None: head_dim ** -0.5. pool_dtype: None: dtype. scaled: kv_scales are given. spare_lanes: what W has beyond
    2GH. traced_offset: page_offset is an array. num_pages: of a layer, of which the rows take the highest; None: a
    few more than they need.
    """

    name: str
    lens: Lens
    decode: bool = False
    page_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    pool_dtype: str | None = None
    scale: float | None = None
    sliding_window: int | None = None
    logit_soft_cap: float | None = None
    return_lse: bool = False
    scaled: bool = False
    spare_lanes: int = 0
    traced_offset: bool = False
    num_pages: int | None = None
    num_row_pads: int = 2
    num_token_pads: int = 3

    @property
    def max_q_len(self) -> int:
        """Of the call."""
        return 1 if self.decode else sum(q_len for q_len, _ in self.lens) + self.num_token_pads

    @property
    def score_scale(self) -> float:
        """Of the call."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


def _decode_of(*kv_lens: int) -> Lens:
    return tuple((1, kv_len - 1) for kv_len in kv_lens)


DECODE = _decode_of(1, 2, 15, 16, 17, 63, 64, 65, 130)
PREFILL: Lens = ((40, 0), (17, 0), (3, 0))
CACHED: Lens = ((5, 96), (33, 63), (2, 127), (20, 1))
MIXED: Lens = ((1, 40), (21, 0), (1, 0), (7, 77), (1, 128))


def _grid() -> Iterator[OracleCase]:
    yield OracleCase("decode", DECODE, decode=True)
    yield OracleCase("prefill", PREFILL)
    yield OracleCase("cached-prefix", CACHED)
    yield OracleCase("mixed", MIXED)
    yield OracleCase("no-padding", MIXED, num_row_pads=0, num_token_pads=0)
    yield OracleCase("one-token", ((1, 0),), decode=True, num_row_pads=0, num_token_pads=0)
    yield OracleCase("decode-more-tokens-than-rows", DECODE, decode=True, num_row_pads=1, num_token_pads=7)
    for num_heads, num_kv_heads in ((2, 2), (6, 2), (5, 1), (16, 2), (16, 1)):
        name = f"{num_heads}-heads-on-{num_kv_heads}"
        yield OracleCase(f"decode-{name}", DECODE, decode=True, num_heads=num_heads, num_kv_heads=num_kv_heads)
        yield OracleCase(f"mixed-{name}", MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for head_dim in (80, 96, 128, 256):
        yield OracleCase(f"decode-head-dim-{head_dim}", DECODE, decode=True, head_dim=head_dim)
        yield OracleCase(f"cached-prefix-head-dim-{head_dim}", CACHED, head_dim=head_dim)
    for page_size in (1, 64):
        yield OracleCase(f"decode-page-size-{page_size}", DECODE, decode=True, page_size=page_size)
        yield OracleCase(f"mixed-page-size-{page_size}", MIXED, page_size=page_size)
    for window in (1, 16, 50):
        yield OracleCase(f"decode-window-{window}", DECODE, decode=True, sliding_window=window)
        yield OracleCase(f"cached-prefix-window-{window}", CACHED, sliding_window=window)
    yield OracleCase("mixed-window-20", MIXED, sliding_window=20)
    yield OracleCase("mixed-window-longer-than-rows", MIXED, sliding_window=1000)
    yield OracleCase("decode-soft-cap", DECODE, decode=True, logit_soft_cap=2.0)
    yield OracleCase("decode-high-soft-cap", DECODE, decode=True, logit_soft_cap=1e6)
    yield OracleCase("mixed-soft-cap", MIXED, logit_soft_cap=20.0, scale=0.5)
    yield OracleCase("mixed-window-and-soft-cap", MIXED, sliding_window=20, logit_soft_cap=2.0)
    yield OracleCase("decode-lse", DECODE, decode=True, return_lse=True)
    yield OracleCase("mixed-lse", MIXED, return_lse=True)
    yield OracleCase("mixed-lse-window-and-soft-cap", MIXED, return_lse=True, sliding_window=20, logit_soft_cap=2.0)
    yield OracleCase("decode-highest-pages", DECODE, decode=True, page_size=1, num_pages=40_000, head_dim=16)
    yield OracleCase("mixed-highest-pages", MIXED, page_size=1, num_pages=40_000, head_dim=16)
    yield OracleCase("decode-traced-page-offset", DECODE, decode=True, traced_offset=True)
    yield OracleCase("mixed-rounded-width", MIXED, num_heads=3, num_kv_heads=3, head_dim=80, spare_lanes=32)
    yield OracleCase("decode-rounded-width", DECODE, decode=True, num_heads=6, num_kv_heads=3, spare_lanes=128)
    for dtype in ("bfloat16", "float16"):
        yield OracleCase(f"decode-{dtype}", DECODE, decode=True, dtype=dtype)
        yield OracleCase(f"mixed-{dtype}", MIXED, dtype=dtype)
    yield OracleCase("mixed-bfloat16-on-float32-pool", MIXED, dtype="bfloat16", pool_dtype="float32")
    for pool_dtype in ("float8_e4m3fn", "float8_e5m2"):
        mixed = OracleCase(f"mixed-{pool_dtype}", MIXED, dtype="bfloat16", pool_dtype=pool_dtype, scaled=True)
        yield replace(mixed, name=f"decode-{pool_dtype}", lens=DECODE, decode=True)
        yield mixed
    yield OracleCase("mixed-scales-of-float32", MIXED, scaled=True)


GRID = tuple(_grid())


def case_inputs(case: OracleCase) -> PagedRows:
    """The arrays of a case, in numpy; the same each time. Values are of the case's dtypes."""
    q_lens, cached_lens = zip(*case.lens, strict=True)
    rows = poisoned_rows(
        q_lens,
        cached_lens,
        page_size=case.page_size,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        num_row_pads=case.num_row_pads,
        num_token_pads=case.num_token_pads,
        spare_lanes=case.spare_lanes,
        num_pages=case.num_pages,
        in_highest=case.num_pages is not None,
    )
    scales = None
    if case.scaled:
        rng = np.random.default_rng(1)
        scales = rng.uniform(0.25, MAX_KV_SCALE, (case.num_kv_heads, 2)).astype(np.float32)
    # Not all float8 have an infinity: NaN stands for it there.
    return PagedRows(
        q=rows.q.astype(jnp.dtype(case.dtype)),
        kv_pages=rows.kv_pages.astype(jnp.dtype(case.pool_dtype or case.dtype)),
        page_table=rows.page_table,
        kv_lens=rows.kv_lens,
        cu_q_lens=rows.cu_q_lens,
        page_offset=rows.page_offset,
        num_tokens=rows.num_tokens,
        kv_scales=scales,
    )


def expected(case: OracleCase, rows: PagedRows) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64, for all tokens: 0 and -inf for those of no row."""
    given = paged_attention_reference(
        rows.q.astype(np.float64),
        rows.kv_pages,
        *rows.rows,
        page_offset=rows.page_offset,
        scale=case.score_scale,
        sliding_window=case.sliding_window,
        logit_soft_cap=case.logit_soft_cap,
        return_lse=True,
        num_kv_heads=case.num_kv_heads,
        kv_scales=rows.kv_scales,
    )
    assert isinstance(given, tuple)
    return given


def tolerance(case: OracleCase, matmul_eps: float = 0.0) -> float:
    """How far rounding may move an output, or a log sum, where values are about 1.

    Scores are sums of head_dim products and outputs of kv_len ones, rounded to float32 and independently of each other;
    a soft cap rounds scores near it; weights and outputs are rounded to `dtype`. matmul_eps: what the device's
    matmuls round their float32 inputs to, which moves scores by that share of their size.
    """
    eps, longest = float(np.finfo(np.float32).eps), max(sum(lens) for lens in case.lens)
    summed = case.head_dim**0.5 + longest**0.5 + min(case.logit_soft_cap or 0.0, 20.0)
    size = MAX_KV_SCALE if case.scaled else 1.0
    score_size = max(1.0, case.score_scale * case.head_dim**0.5)
    return 4 * size * (eps * summed + max(float(jnp.finfo(case.dtype).eps), matmul_eps * score_size))


def poisoned_rows(
    q_lens: Sequence[int],
    cached_lens: Sequence[int],
    *,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_row_pads: int = 0,
    num_token_pads: int = 0,
    table_width: int | None = None,
    num_spare_pages: int = 3,
    num_pages: int | None = None,
    in_highest: bool = False,
    spare_lanes: int = 0,
    seed: int = 0,
) -> PagedRows:
    """Rows of `q_lens` new tokens after `cached_lens` cached ones, in pages of no order, the highest one among them.

    The pool has NUM_LAYERS layers, and the rows lie in the last. Padding rows come last and read the null page, which
    is poisoned as is every slot behind a row's end, every page of the other layer and the `spare_lanes`. in_highest:
    all pages of the rows are the highest.
    """
    rng = np.random.default_rng(seed)
    kv_lens = np.add(q_lens, cached_lens).astype(np.int32)
    pages_per_row = -(-kv_lens // page_size)
    num_used = int(pages_per_row.sum())
    num_pages = num_pages or num_used + 1 + num_spare_pages
    width = 2 * num_kv_heads * head_dim
    kv_pages = rng.choice(_POISON, (NUM_LAYERS * num_pages, page_size, width + spare_lanes)).astype(np.float32)
    lowest = num_pages - num_used if in_highest else 1
    others = rng.permutation(np.arange(lowest, num_pages - 1))[: num_used - 1]
    chosen = np.append(num_pages - 1, others).astype(np.int32)
    page_offset = (NUM_LAYERS - 1) * num_pages
    page_table = np.zeros((len(q_lens) + num_row_pads, table_width or int(pages_per_row.max())), np.int32)
    taken = 0
    for row, (kv_len, num) in enumerate(zip(kv_lens, pages_per_row, strict=True)):
        pages = chosen[taken : taken + num]
        taken += num
        page_table[row, :num] = pages
        positions = np.arange(kv_len)
        kv_pages[pages[positions // page_size] + page_offset, positions % page_size, :width] = rng.standard_normal(
            (kv_len, width)
        )
    num_tokens = sum(q_lens)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens), [num_tokens] * num_row_pads]).astype(np.int32)
    return PagedRows(
        q=rng.standard_normal((num_tokens + num_token_pads, num_heads, head_dim)).astype(np.float32),
        kv_pages=kv_pages,
        page_table=page_table,
        kv_lens=np.append(kv_lens, np.zeros(num_row_pads, np.int32)),
        cu_q_lens=cu_q_lens,
        page_offset=page_offset,
        num_tokens=num_tokens,
    )
