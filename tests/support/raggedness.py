"""Any lengths of rows in one shape of call, for property tests of paged attention."""

from dataclasses import dataclass

import hypothesis.strategies as st

from radix_jax.pallas_kernels.paged_attention.oracle_grid import PagedRows, poisoned_rows

PAGE_SIZE, TABLE_WIDTH, HEAD_DIM = 4, 30, 8
MAX_KV_LEN = PAGE_SIZE * TABLE_WIDTH


@dataclass(frozen=True)
class Raggedness:
    """Tokens that each row computes, and those cached in front of them; MAX_KV_LEN at most together."""

    q_lens: tuple[int, ...]
    cached_lens: tuple[int, ...]
    seed: int

    def rows(self, *, num_rows: int, num_tokens: int, num_heads: int) -> PagedRows:
        """Padded to so many rows and tokens; one KV head."""
        return poisoned_rows(
            self.q_lens,
            self.cached_lens,
            page_size=PAGE_SIZE,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            num_row_pads=num_rows - len(self.q_lens),
            num_token_pads=num_tokens - sum(self.q_lens),
            table_width=TABLE_WIDTH,
            num_pages=num_rows * TABLE_WIDTH + 2,
            seed=self.seed,
        )


@st.composite
def raggedness(draw: st.DrawFn, *, num_rows: int, num_tokens: int) -> Raggedness:
    """1 to `num_rows` rows that compute `num_tokens` at most together."""
    q_lens = draw(
        st.lists(st.integers(1, 100), min_size=1, max_size=num_rows).filter(lambda lens: sum(lens) <= num_tokens)
    )
    cached_lens = [draw(st.integers(0, MAX_KV_LEN - q_len)) for q_len in q_lens]
    return Raggedness(tuple(q_lens), tuple(cached_lens), draw(st.integers(0, 2**32 - 1)))
