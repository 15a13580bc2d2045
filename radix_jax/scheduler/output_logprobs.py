"""OutputLogprobs: how likely each output token of one request was."""

from radix_jax.plan import TokenLogprobs
from radix_jax.request import Logprob


class OutputLogprobs:
    """Grows by an entry with each output token.

    by_token: token id -> Logprob, the output token first, then `num_top` most likely ones, best first.
    sampling: log-probability of the output token in what it was drawn from.
    total: the sum over the output tokens.
    """

    __slots__ = ("_num_top", "by_token", "sampling", "total")

    def __init__(self, num_top: int):
        self._num_top = num_top
        self.by_token: list[dict[int, Logprob]] = []
        self.sampling: list[float] = []
        self.total: float = 0.0

    def append(self, token_id: int, step: TokenLogprobs, row: int) -> None:
        """Take over what a step says of the token that its row sampled."""
        own = float(step.sampled[row])
        entry = {token_id: Logprob(own, int(step.rank[row]))}
        tops = zip(step.top_ids[row, : self._num_top].tolist(), step.top[row, : self._num_top].tolist(), strict=True)
        # Among equally likely tokens the order of the best ones is the rank, for the output token too.
        entry |= {top_id: Logprob(top, rank) for rank, (top_id, top) in enumerate(tops, 1)}
        self.by_token.append(entry)
        self.sampling.append(float(step.sampling[row]))
        self.total += own
