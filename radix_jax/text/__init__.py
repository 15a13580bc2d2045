"""Text: tokenizers, chat templates and the incremental detokenizer."""

from radix_jax.text.chat import ChatTemplate
from radix_jax.text.detokenizer import IncrementalDetokenizer
from radix_jax.text.errors import TextError
from radix_jax.text.foreign import AnyTokenizer, ForeignTokenizer, as_tokenizer
from radix_jax.text.loading import load_tokenizer
from radix_jax.text.logprobs import with_decoded_tokens
from radix_jax.text.tokenizer import Tokenizer

__all__ = [
    "AnyTokenizer",
    "ChatTemplate",
    "ForeignTokenizer",
    "IncrementalDetokenizer",
    "TextError",
    "Tokenizer",
    "as_tokenizer",
    "load_tokenizer",
    "with_decoded_tokens",
]
