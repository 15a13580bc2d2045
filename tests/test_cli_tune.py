"""radix-jax tune at the command line: without a GPU, with odd arguments, and what it prints and writes with one."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from radix_jax import tune as tune_module
from radix_jax.cli_tune import tune
from radix_jax.pallas_kernels.paged_attention import gpu_blocks
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import DecodeBlocks, ExtendBlocks
from radix_jax.tune import Tuned, TuneShape

DECODE = {"kernel": "decode", "block_len": 128, "num_warps": 4, "num_stages": 2, "programs": 264}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typer.Typer:
    monkeypatch.setenv("RADIX_JAX_CACHE", str(tmp_path))
    app = typer.Typer()
    app.command()(tune)
    return app


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TuneShape]:
    """Stands for a GPU: what is asked to be measured; decode gets quicker, extend doesn't."""
    shapes: list[TuneShape] = []

    def measure(shape: TuneShape, **_: Any) -> list[Tuned]:
        shapes.append(shape)
        decode = DecodeBlocks(64, 4, 4, 3), DecodeBlocks(128, 2, 4, 2)
        extend = ExtendBlocks(64, 64, 4, 2)
        return [
            Tuned("decode", decode[0], 3e-4, decode[1], 2.5e-4, DECODE, 28, 3),
            Tuned("extend", extend, 1e-3, extend, 1e-3, None, 55, 9),
        ]

    monkeypatch.setattr(tune_module, "check_device", lambda: "NVIDIA H200")
    monkeypatch.setattr(tune_module, "tune", measure)
    return shapes


def test_without_a_gpu_nothing_is_written(command: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ValueError)
    assert "jax sees none here" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_what_is_better_is_told_and_kept(command: typer.Typer, asked: list[TuneShape], tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--model", "llama3-8b", "--kv-dtype", "float8_e4m3fn", "--context", "8192"])
    assert result.exit_code == 0, result.output
    assert asked == [TuneShape(32, 8, 128, kv_dtype="float8_e4m3fn", context_len=8192)]
    assert "300.0" in result.output
    assert "20%" in result.output
    assert "warps 4" in result.output
    assert json.loads((tmp_path / gpu_blocks.FILE_NAME).read_text()) == {"NVIDIA H200": [DECODE]}


def test_heads_are_given_together_and_alone(command: typer.Typer, asked: list[TuneShape]) -> None:
    heads = ["--num-heads", "6", "--num-kv-heads", "2", "--head-dim", "64"]
    assert CliRunner().invoke(command, [*heads, "--dtype", "float16"]).exit_code == 0
    assert asked == [TuneShape(6, 2, 64, dtype="float16", kv_dtype="float16")]
    for arguments, message in (
        (heads[:4], "go together"),
        ([*heads, "--model", "llama3-8b"], "not both"),
        (["--num-heads", "5", *heads[2:]], "not a multiple"),
    ):
        assert message in str(CliRunner().invoke(command, arguments).exception)
    assert len(asked) == 1
