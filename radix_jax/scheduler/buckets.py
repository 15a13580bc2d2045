"""The finite set of padded shapes that steps run in: one compiled program each."""

from radix_jax.config import DETERMINISTIC_STEP_LEN
from radix_jax.plan import Bucket, row_counts, token_counts


class Buckets:
    """Padded shapes of an engine, few by design: rows and tokens are powers of two, pages a row is one value.

    Decode: 8, 16, 32, ... rows, up to max_running_requests rounded up. Prefill: 64, 128, 256, ... tokens, up to
    max_prefill_tokens rounded up, each with 8 rows or with the most rows.

    deterministic: one shape for every step, so that no sum is ever cut another way.

    Raises:
        ValueError: a limit below 1.
    """

    def __init__(
        self,
        *,
        page_size: int,
        max_model_len: int,
        max_running_requests: int,
        max_prefill_tokens: int,
        deterministic: bool = False,
    ):
        for name, value in (
            ("page_size", page_size),
            ("max_model_len", max_model_len),
            ("max_running_requests", max_running_requests),
            ("max_prefill_tokens", max_prefill_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} is below its least value 1")
        num_pages = -(-max_model_len // page_size)
        if deterministic:
            self._decode = self._prefill = (
                Bucket("prefill", DETERMINISTIC_STEP_LEN, DETERMINISTIC_STEP_LEN, num_pages),
            )
            return
        counts = row_counts(max_running_requests)
        self._decode = tuple(Bucket("decode", rows, rows, num_pages) for rows in counts)
        self._prefill = tuple(
            Bucket("prefill", tokens, rows, num_pages)
            for tokens in token_counts(max_prefill_tokens)
            for rows in sorted({counts[0], counts[-1]})
        )

    @property
    def max_rows(self) -> int:
        """Rows of the largest bucket."""
        return self._decode[-1].num_rows

    def for_decode(self, num_rows: int) -> Bucket:
        """The smallest decode bucket that holds `num_rows` rows.

        Raises:
            ValueError: more rows than any bucket holds.
        """
        return _smallest(self._decode, num_tokens=num_rows, num_rows=num_rows)

    def for_prefill(self, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest prefill bucket that holds `num_tokens` tokens in `num_rows` rows.

        Raises:
            ValueError: more tokens or rows than any bucket holds.
        """
        return _smallest(self._prefill, num_tokens=num_tokens, num_rows=num_rows)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket, smallest first, decode before prefill."""
        return tuple(dict.fromkeys(self._decode + self._prefill))


def _smallest(buckets: tuple[Bucket, ...], *, num_tokens: int, num_rows: int) -> Bucket:
    for bucket in buckets:
        if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows:
            return bucket
    largest = buckets[-1]
    raise ValueError(
        f"a {largest.kind} step of {num_tokens} tokens in {num_rows} rows exceeds the largest bucket of "
        f"{largest.num_tokens} tokens in {largest.num_rows} rows; raise max_prefill_tokens or max_running_requests"
    )
