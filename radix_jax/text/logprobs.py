"""Log-probabilities with the text of their tokens."""

import dataclasses

from radix_jax.request import Logprob
from radix_jax.text.foreign import AnyTokenizer


def with_decoded_tokens(logprobs: list[dict[int, Logprob]], tokenizer: AnyTokenizer) -> list[dict[int, Logprob]]:
    """Each token with its own text, special ones by their names; half a character is U+FFFD."""
    texts: dict[int, str] = {}
    for token_id in {token_id for entry in logprobs for token_id in entry}:
        texts[token_id] = tokenizer.decode([token_id], skip_special_tokens=False)
    return [
        {token_id: dataclasses.replace(one, decoded_token=texts[token_id]) for token_id, one in entry.items()}
        for entry in logprobs
    ]
