"""radix-jax aot: what it refuses, and a small model's steps for an H200."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aot_extra import needs_compilers, needs_libtpu

from radix_jax.aot import compiling, tpu_compiling
from radix_jax.cli import main

Run = Callable[..., tuple[int, str, str]]
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
# Embedding, then a layer's q and o, k and v, MLP and norms, then the last norm.
SMALL_WEIGHTS = 1024 * 256 + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256) + 256
KV_TOKEN_BYTES = 2 * 2 * 2 * 64 * 2  # layers, K and V, heads, head_dim, bfloat16


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `radix-jax aot ...` in this process: exit code, output, errors."""
    before = signal.getsignal(signal.SIGTERM)

    def run_main(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        monkeypatch.setattr(sys, "argv", ["radix-jax", "aot", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code or 0
        assert isinstance(code, int)
        return code, captured.out, captured.err

    yield run_main
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused before anything is compiled needs no compilers."""
    monkeypatch.setattr(compiling, "check_installed", lambda: None)
    monkeypatch.setattr(tpu_compiling, "check_libtpu", lambda: None)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model of which there is a config alone."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path)


def test_an_unknown_target_is_refused(run: Run) -> None:
    code, out, err = run("--target", "h300")
    assert (code, out) == (2, "")
    known = "h200, h100, a100, l4, rtx4090, v4, v5e, v5p, v6e, v7x"
    assert err == f"error: target 'h300' is not one of {known}; a TPU may have a topology, as v5e:2x4\n"


def test_without_libtpu_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_compiling, "_LIBTPU", "no_such_package")
    code, out, err = run("--target", "v5e:2x4")
    assert (code, out) == (2, "")
    assert "libtpu is not installed; run: pip install 'radix_jax[aot-tpu]'" in err


def test_without_compilers_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_PLUGIN", "no-such-plugin")
    code, _, err = run()
    assert (code, err) == (2, "error: no-such-plugin is not installed; run: pip install 'radix_jax[aot]'\n")


@pytest.mark.usefixtures("as_if_installed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "5000", "--max-model-len", "4096"), "context=5000 is outside [1, 4096], max_model_len"),
        (("--context", "0"), "context=0 is outside [1, "),
        (("--model", "qwen2.5-7b", "--max-model-len", "40000"), "exceeds the 32768 positions of the model"),
        (("--target", "l4", "--dtype", "float32"), "no room for 2 pages"),
        (("--attention-backend", "pallas_tpu"), "'pallas_tpu' does not run on a GPU; give auto or xla"),
        (("--target", "v5e", "--attention-backend", "pallas_gpu"), "'pallas_gpu' does not run on a TPU; give auto"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.slow
@needs_libtpu()
def test_a_topology_that_libtpu_refuses(run: Run, folder: str) -> None:
    code, out, err = run("--target", "v5e:7x9", "--model", folder)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: the steps of {folder} do not compile for v5e:7x9: JaxRuntimeError: ")
    assert "is not divisible by" in err


@pytest.mark.slow
@needs_compilers()
def test_a_folder_with_a_config_alone(run: Run, folder: str) -> None:
    code, out, _ = run("--model", folder, "--max-running-requests", "16", "--max-prefill-tokens", "256", "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["target"], report["settings"]["dtype"]) == ("h200", "bfloat16")
    assert report["kv_tokens"] == (report["num_pages"] - 1) * report["settings"]["page_size"]
    assert report["num_requests"] == report["kv_tokens"] // 512
    decode, prefill = report["steps"]
    assert (decode["kind"], decode["num_tokens"], decode["num_rows"], decode["context_len"]) == ("decode", 16, 16, 512)
    assert (prefill["kind"], prefill["num_tokens"], prefill["num_rows"]) == ("prefill", 256, 1)
    for step in report["steps"]:
        assert step["weights_bytes"] == 2 * SMALL_WEIGHTS
        assert step["alias_bytes"] == step["pool_bytes"] + step["sampler_bytes"]
        assert step["compile_s"] > 0
        assert all(kernel["num_launches"] == 2 for kernel in step["kernels"])
    assert decode["moved_bytes"] == 2 * SMALL_WEIGHTS + (16 * 512 + 16) * KV_TOKEN_BYTES
    assert {kernel["name"] for kernel in decode["kernels"]} == {"combine_kernel", "decode_kernel", "write_kernel"}


@pytest.mark.slow
@needs_compilers()
def test_a_table_of_a_float8_pool_on_an_l4(run: Run, folder: str) -> None:
    options = ("--target", "l4", "--kv-dtype", "float8_e4m3fn", "--page-size", "64", "--max-running-requests", "8")
    code, out, _ = run("--model", folder, *options, "--max-prefill-tokens", "64")
    assert code == 0
    out = " ".join(out.split())  # a long folder breaks the lines
    for part in ("on l4, bfloat16, attention by pallas_gpu", "decode_kernel", "bandwidth", "requests of 512"):
        assert part in out


@pytest.mark.slow
@needs_compilers()
def test_attention_without_our_kernels(run: Run, folder: str) -> None:
    small = ("--max-running-requests", "8", "--max-prefill-tokens", "64")
    code, out, _ = run("--model", folder, "--attention-backend", "xla", *small, "--json")
    assert code == 0
    assert all(step["kernels"] == [] for step in json.loads(out)["steps"])
