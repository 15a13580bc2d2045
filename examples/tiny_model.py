"""What the example scripts run on: a random Llama of some 80,000 weights, or the model that the command line names."""

import sys
from collections.abc import Sequence
from typing import Any

from flax import nnx

from radix_jax import LLM
from radix_jax.models.llama import Llama, LlamaConfig

# Few and small shapes of step, as each is compiled on first use.
SETTINGS: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 512,
    "max_model_len": 256,
    "max_running_requests": 8,
    "max_prefill_tokens": 64,
}
CONFIG = LlamaConfig(
    vocab_size=95,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)


class Letters:
    """A tokenizer without a file: one token a printable ASCII character; any other one is a question mark."""

    def encode(self, text: str) -> list[int]:
        """Token ids, 0 for a space up to 94 for a tilde."""
        return [ord(char if " " <= char <= "~" else "?") - 32 for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters of the ids."""
        return "".join(chr(32 + token_id) for token_id in ids)


def open_llm(**engine_fields: Any) -> LLM:
    """`python examples/NAME.py` takes the random model, which talks nonsense, `python examples/NAME.py MODEL` a real
    one: a built-in name, a hub id, a folder or a .gguf file."""
    fields = SETTINGS | engine_fields
    if len(sys.argv) > 1:
        return LLM(sys.argv[1], **fields)
    return LLM(Llama(CONFIG, rngs=nnx.Rngs(0)), tokenizer=Letters(), **fields)
