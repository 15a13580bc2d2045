"""Text: tokenizers, chat templates, the incremental detokenizer and stop strings."""

from radix_jax.text.chat import ChatTemplate
from radix_jax.text.detokenizer import IncrementalDetokenizer
from radix_jax.text.errors import TextError
from radix_jax.text.foreign import AnyTokenizer, ForeignTokenizer, as_tokenizer
from radix_jax.text.loading import load_tokenizer
from radix_jax.text.logprobs import with_decoded_tokens
from radix_jax.text.stop_text import StopText
from radix_jax.text.tokenizer import Tokenizer

__all__ = [
    "AnyTokenizer",
    "ChatTemplate",
    "ForeignTokenizer",
    "IncrementalDetokenizer",
    "StopText",
    "TextError",
    "Tokenizer",
    "as_tokenizer",
    "load_tokenizer",
    "with_decoded_tokens",
]
