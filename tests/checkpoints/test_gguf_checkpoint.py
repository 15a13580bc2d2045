"""GGUF checkpoints: every tensor type, the permuted q and k, and the configuration made from metadata."""

import math
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from small_files import LLAMA_METADATA, quantized, write_gguf, write_json

from radix_jax.arrays import WeightSpec
from radix_jax.checkpoints import CheckpointError, load_weights, open_checkpoint
from radix_jax.gguf_file import GGUFError

RNG = np.random.default_rng(0)


def load_one(path: Path, shape: tuple[int, ...], dtype: str = "float32", **options: Any) -> np.ndarray:
    """The tensor "w" of a GGUF file through load_weights."""
    spec = WeightSpec(("w",), "hf", "w", shape, **options)
    with open_checkpoint(path) as checkpoint:
        return load_weights(checkpoint, [spec], dtype, lambda spec, array: array, progress=False)[0]


def library_reads(kind: GGMLQuantizationType) -> bool:
    """Whether the library can dequantise this type."""
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if library_reads(kind)], ids=lambda k: k.name)
def test_every_type_that_the_library_dequantises(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    row_len = 2 * max(block_len, 16)
    packed = RNG.integers(0, 256, (6, row_len // block_len * block_bytes), dtype=np.uint8)
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {"w": (packed, kind)})
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(packed, kind)
        loaded = load_one(path, (6, row_len))
    assert expected.shape == (6, row_len)
    np.testing.assert_array_equal(loaded, expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_come_back_near_and_in_order(tmp_path: Path, kind: str) -> None:
    values = RNG.normal(size=(40, 512)).astype(np.float32)
    packed = quantized(values, GGMLQuantizationType[kind])
    loaded = load_one(write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {"w": packed}), values.shape)
    assert np.corrcoef(loaded.ravel(), values.ravel())[0, 1] > 0.99


def test_a_tensor_of_many_pieces_is_whole(tmp_path: Path) -> None:
    values = RNG.normal(size=(2500, 1024)).astype(np.float32)
    packed = quantized(values, GGMLQuantizationType.Q8_0)
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {"w": packed})
    expected = gguf.quants.dequantize(*packed)
    np.testing.assert_array_equal(load_one(path, values.shape), expected)
    np.testing.assert_array_equal(load_one(path, values.shape, transpose=True), expected.T)
    rounded = load_one(path, values.shape, "bfloat16", transpose=True)
    assert rounded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rounded, expected.T.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.I8, GGMLQuantizationType.I32])
def test_a_type_that_the_library_cannot_dequantise_is_named(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    ints = np.ones((2, 4), np.int8 if kind == GGMLQuantizationType.I8 else np.int32)
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {"w": ints})
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tensor w has type {kind.name}"):
        load_one(path, (2, 4))


def rotate_neighbours(rows: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rope as GGUF's engines apply it: rows 2j and 2j + 1 of a head turn by angle j."""
    even, odd = rows[0::2], rows[1::2]
    turned = np.empty_like(rows)
    turned[0::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned


def rotate_halves(rows: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rope as Llama's own code on the hub applies it: rows j and j + head_dim / 2 turn by angle j."""
    first, second = np.split(rows, 2)
    turned_first = first * np.cos(angles) - second * np.sin(angles)
    return np.concatenate([turned_first, first * np.sin(angles) + second * np.cos(angles)])


@pytest.mark.parametrize("shape", [(32, 12), (32,)])
@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_unpermuted_q_and_k_give_the_same_scores(tmp_path: Path, shape: tuple[int, ...], num_heads: int) -> None:
    q, k = (RNG.normal(size=shape).astype(np.float32) for _ in range(2))
    x, y = (RNG.normal(size=shape[1:]).astype(np.float32) for _ in range(2))
    angles_x, angles_y = RNG.normal(size=(2, 32 // num_heads // 2))
    usual_q, usual_k = (
        load_one(write_gguf(tmp_path / f"{i}.gguf", LLAMA_METADATA, {"w": w}), shape, gguf_rope_heads=num_heads)
        for i, w in enumerate((q, k))
    )
    for head in np.split(np.arange(32), num_heads):
        score = rotate_neighbours((q @ x if x.ndim else q * x)[head], angles_x) @ rotate_neighbours(
            (k @ y if y.ndim else k * y)[head], angles_y
        )
        ours = rotate_halves((usual_q @ x if x.ndim else usual_q * x)[head], angles_x) @ rotate_halves(
            (usual_k @ y if y.ndim else usual_k * y)[head], angles_y
        )
        np.testing.assert_allclose(ours, score, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(usual_q, q)


def test_unpermuting_transposes_too(tmp_path: Path) -> None:
    usual = RNG.normal(size=(16, 6)).astype(np.float32)
    stored = usual.reshape(2, 2, 4, 6).swapaxes(1, 2).reshape(16, 6)
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {"w": stored})
    np.testing.assert_array_equal(load_one(path, (16, 6), gguf_rope_heads=2), usual)
    np.testing.assert_array_equal(load_one(path, (16, 6), gguf_rope_heads=2, transpose=True), usual.T)


def config_of(tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any] | None = None) -> dict[str, Any]:
    """hf_config of a GGUF file with these values and tensors."""
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA_METADATA | metadata, tensors or {})) as checkpoint:
        return checkpoint.hf_config


def test_configuration_in_hugging_face_s_words(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {"llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 16},
        {"token_embd.weight": np.zeros((500, 64), np.float32), "blk.0.attn_q.weight": np.zeros((64, 64), np.float32)},
    )
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": float(np.float32(1e-5)),
        "rope_theta": 5e5,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": 500,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_head_dim_is_not_hidden_over_heads(tmp_path: Path) -> None:
    query = {"blk.0.attn_q.weight": np.zeros((128, 64), np.float32)}
    assert config_of(tmp_path, {}, query)["head_dim"] == 32
    assert config_of(tmp_path, {"llama.attention.key_length": 40})["head_dim"] == 40


@pytest.mark.parametrize(
    ("metadata", "tensors", "expected"),
    [
        ({}, {"output.weight": np.zeros((9, 64), np.float32)}, {"tie_word_embeddings": False}),
        ({}, {"blk.0.attn_q.bias": np.zeros(64, np.float32)}, {"attention_bias": True}),
        ({}, {"blk.0.ffn_up.bias": np.zeros(96, np.float32)}, {"mlp_bias": True}),
        ({"llama.rope.dimension_count": 8}, {}, {"partial_rotary_factor": 0.5}),
        ({"llama.attention.sliding_window": 32}, {}, {"sliding_window": 32}),
        ({"llama.expert_count": 8}, {}, {"architectures": ["llama with 8 experts"]}),
        ({"llama.rope.scaling.type": "none"}, {}, {"rope_scaling": None}),
        ({"llama.rope.scale_linear": 4.0}, {}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {},
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
        ),
        ({}, {"rope_freqs.weight": np.ones(8, np.float32)}, {"rope_scaling": None}),
    ],
)
def test_configuration_follows_the_file(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = config_of(tmp_path, metadata, tensors)
    assert {key: config[key] for key in expected} == expected


def llama3_factors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original_len: int
) -> np.ndarray:
    """By what Llama 3's scaling divides the frequency of each pair (Llama 3.1 model card), pair by pair."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < original_len / high:
            factors.append(1.0)
        elif wavelength > original_len / low:
            factors.append(factor)
        else:
            smooth = (original_len / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(factors, np.float32)


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "low", "high", "original_len"),
    [(128, 5e5, 8.0, 1.0, 4.0, 8192), (64, 5e5, 32.0, 1.0, 4.0, 8192), (128, 1e4, 4.0, 2.0, 16.0, 4096)],
)
def test_llama3_rope_is_found_again_in_its_factors(
    tmp_path: Path, head_dim: int, theta: float, factor: float, low: float, high: float, original_len: int
) -> None:
    factors = llama3_factors(head_dim, theta, factor, low, high, original_len)
    metadata = {"llama.rope.freq_base": theta, "llama.attention.key_length": head_dim}
    scaling = config_of(tmp_path, metadata, {"rope_freqs.weight": factors})["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": pytest.approx(high / low, rel=1e-5),
        "original_max_position_embeddings": original_len / low,
    }


def test_factors_of_another_scaling_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"m\.gguf: rope_freqs\.weight is not a llama3 rope scaling"):
        config_of(tmp_path, {}, {"rope_freqs.weight": factors})


def test_another_architecture_keeps_its_name(tmp_path: Path) -> None:
    metadata = {key.replace("llama", "qwen9"): value for key, value in LLAMA_METADATA.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata, {}, arch="qwen9")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.hf_config["architectures"] == ["qwen9"]


@pytest.mark.parametrize("key", [key for key in LLAMA_METADATA if not key.endswith("head_count_kv")])
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    metadata = {k: v for k, v in LLAMA_METADATA.items() if k != key}
    path = write_gguf(tmp_path / "m.gguf", metadata, {})
    with pytest.raises(CheckpointError, match=rf"m\.gguf has no metadata {key}"):
        open_checkpoint(path)


@pytest.mark.parametrize(("key", "value"), [("attention.head_count", 0), ("attention.head_count_kv", [2, 2])])
def test_metadata_that_is_no_number_is_named(tmp_path: Path, key: str, value: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA | {f"llama.{key}": value}, {})
    with pytest.raises(CheckpointError, match=rf"metadata llama\.{key} is .*, not one number above 0"):
        open_checkpoint(path)


def test_ids_that_end_a_sequence_are_gathered(tmp_path: Path) -> None:
    ids = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("bos", "eos", "eot", "eom"))}
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA | ids, {})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.eos_token_ids == {1, 2, 3}
        assert checkpoint.bos_token_id == 0


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA | {"split.count": 3}, {})
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_checkpoint(path)


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", {})
    path = write_gguf(folder / "m.gguf", LLAMA_METADATA, {})
    with open_checkpoint(folder) as checkpoint:
        assert (checkpoint.path, checkpoint.format) == (path, "gguf")
    write_gguf(folder / "n.gguf", LLAMA_METADATA, {})
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(m.gguf, n.gguf\)"):
        open_checkpoint(folder)


def test_a_cut_file_does_not_open(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {"w": np.ones((64, 64), np.float32)})
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(GGUFError, match=r"m\.gguf is cut off: tensor w needs bytes"):
        open_checkpoint(path)


def test_a_closed_checkpoint_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, {"w": np.ones(4, np.float32)})
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        next(checkpoint.read_pieces("w"))
