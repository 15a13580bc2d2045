"""LLMs over the tiny Llamas: a byte-level tokenizer with a chat template, and folders that hold both."""

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from small_files import byte_level_core, write_json
from tiny import SMALL, TINY, random_weights, tiny_llama
from tokenizers import decoders, models

from radix_jax import LLM
from radix_jax.models.llama import Llama, LlamaConfig, weight_specs
from radix_jax.text import Tokenizer

# Ids of the special tokens, after the 256 bytes.
SPECIALS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|bos|>")
END_ID, BOS_ID = 259, 260
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(*, add_bos: bool = False, pieces: Sequence[bytes] = ()) -> Tokenizer:
    """One token a byte, and `pieces` that bytes are merged to; special tokens follow."""
    core = byte_level_core(pieces, SPECIALS)
    return Tokenizer(
        core,
        bos_token_id=core.token_to_id("<|bos|>"),
        eos_token_ids=[core.token_to_id("<|end|>")],
        add_bos=add_bos,
        chat_template=CHAT_TEMPLATE,
    )


def new_llm(module: Llama | None = None, tokenizer: Any = None, **fields: Any) -> LLM:
    """An LLM of its own: SMALL, with `fields` changed."""
    return LLM(module or tiny_llama(), tokenizer=tokenizer or byte_tokenizer(), **(SMALL | fields))


@functools.cache
def _kept_llm() -> LLM:
    return new_llm()


def tiny_llm() -> LLM:
    """An idle LLM with an empty cache, kept from test to test and with it its compiles; its counts go on."""
    llm = _kept_llm()
    assert not llm.engine.has_unfinished(), "a test before left requests behind"
    llm.flush_cache()
    return llm


def write_folder(folder: Path, config: LlamaConfig = TINY, weights: dict[Any, Any] | None = None) -> Path:
    """A checkpoint as the hub has them: config.json, model.safetensors, and the files of `byte_tokenizer`."""
    write_weights(folder, config, random_weights(config) if weights is None else weights)
    byte_level_core((), SPECIALS).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE})
    return folder


def write_weights(folder: Path, config: LlamaConfig, weights: dict[Any, Any], **more_config: Any) -> None:
    """config.json and model.safetensors."""
    tensors = {}
    for spec in weight_specs(config):
        if spec.optional:
            continue
        leaf: Any = weights
        for part in spec.path:
            leaf = leaf[part]
        tensors[spec.hf_name] = np.ascontiguousarray(np.asarray(leaf).T if spec.transpose else leaf)
    save_file(tensors, folder / "model.safetensors")
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    write_json(folder / "config.json", hf_config | more_config)


def letter_core(specials: Sequence[int] = ()) -> tokenizers.Tokenizer:
    """64 tokens, token i spelled as the character 33 + i; `specials` are special tokens."""
    spelled = [chr(33 + i) for i in range(64)]
    core = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(spelled)}, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([spelled[i] for i in specials])
    return core


class Terminal(io.StringIO):
    """What a program writes to a terminal; each write kept apart in `writes`."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)
