"""Makes the twins: tiny random Llamas with the logits that transformers gives for them, in float32.

    make test-slow                                   makes the environment that has torch and transformers
    .venv-slow/bin/python tests/oracle/make_twins.py      remakes tests/oracle/twins/

A twin is a folder as `save_pretrained` writes it, and in it `expected.npz`: `token_ids` int32 [T] and `logits`
float32 [T, V], those of every position. The weights are drawn so wide that attention is sharp and logits spread, and
the norms' weights are not all one, so that a forgotten factor shows.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TWINS = Path(__file__).parent / "twins"
NUM_TOKENS = 96

SHARED = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Variant:
    """What one twin is made of.

    config: LlamaConfig fields, besides those that every twin shares.
    stored_as: dtype of the saved weights; they are rounded to it before the logits are computed in float32.
    max_shard_size: largest file of the saved weights, so that some twins come in several.
    """

    seed: int
    config: dict[str, Any]
    stored_as: str = "float32"
    max_shard_size: str = "1GB"

    @property
    def fields(self) -> dict[str, Any]:
        """All LlamaConfig fields of the twin."""
        return SHARED | self.config


def rope(rope_type: str, theta: float = 10000.0, **factors: float) -> dict[str, Any]:
    """The `rope_parameters` of a config."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **factors}}


# A quarter of the twin's context, so that each of the three bands of frequencies is met and matters.
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LINEAR = rope("linear", factor=4.0)
WIDE = {"num_key_value_heads": 2, "head_dim": 16}

VARIANTS = {
    "mha": Variant(1, {"rms_norm_eps": 1e-2}),
    "mqa": Variant(2, {"num_key_value_heads": 1, **rope("default", theta=500.0)}),
    "gqa": Variant(3, {"num_key_value_heads": 2, "num_hidden_layers": 3}, stored_as="bfloat16", max_shard_size="20KB"),
    "gqa_tied": Variant(4, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    # head_dim is neither hidden_size / num_attention_heads nor a divisor of anything else here.
    "head_dim": Variant(5, {"hidden_size": 64, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "rope_llama3": Variant(6, WIDE | LLAMA3),
    "rope_linear": Variant(7, WIDE | LINEAR),
}


def build_model(fields: dict[str, Any], seed: int, stored_as: str = "float32") -> Any:
    """A transformers Llama in float32 whose weights are exact in `stored_as`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.to(getattr(torch, stored_as)).float())
    return model


def draw_token_ids(seed: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """Token ids, int32 [num_tokens]."""
    return np.random.default_rng(seed).integers(0, vocab_size, num_tokens).astype(np.int32)


def all_logits(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Logits of every position in one forward pass without a cache, float32 [T, V]."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(token_ids[None].astype(np.int64)), use_cache=False).logits[0].numpy()


def make_twin(name: str, variant: Variant) -> None:
    """Write the folder of one twin anew."""
    import torch

    folder = TWINS / name
    shutil.rmtree(folder, ignore_errors=True)
    model = build_model(variant.fields, variant.seed, variant.stored_as)
    token_ids = draw_token_ids(variant.seed, NUM_TOKENS, variant.fields["vocab_size"])
    logits = all_logits(model, token_ids)
    model.to(getattr(torch, variant.stored_as)).save_pretrained(folder, max_shard_size=variant.max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "expected.npz", token_ids=token_ids, logits=logits)
    sizes = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: logits {logits.min():.1f} to {logits.max():.1f}, std {logits.std():.2f}, {sizes:,} bytes")


def main() -> None:
    """Remake the twins named on the command line, or all."""
    names = sys.argv[1:] or list(VARIANTS)
    unknown = set(names) - set(VARIANTS)
    if unknown:
        raise SystemExit(f"no twin named {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    for name in names:
        make_twin(name, VARIANTS[name])


if __name__ == "__main__":
    main()
