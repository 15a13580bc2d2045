"""tune: finds what its timer says is quickest, never a wrong one, and keeps it in a file that the kernels then read."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from radix_jax import tune as tune_module
from radix_jax.pallas_kernels.paged_attention import gpu_blocks
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import DecodeBlocks, ExtendBlocks, GpuBlocks, choose_blocks
from radix_jax.tune import Candidates, Trial, TuneShape, check_device, tune, write_choices

SHAPE = TuneShape(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype="float32",
    kv_dtype="float32",
    num_rows=3,
    context_len=48,
    chunk_rows=1,
    chunk_len=8,
)
CANDIDATES = Candidates(block_len=(16, 32), num_rows=(16,), num_warps=(4,), num_stages=(1,), programs=(6, 24))
KEYS = {"lanes": 16, "q_bytes": 4, "kv_bytes": 4, "group_size": 2}


@pytest.fixture
def user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's file, which is not there yet."""
    monkeypatch.setenv("RADIX_JAX_CACHE", str(tmp_path / "cache"))
    gpu_blocks.forget_files()
    return tmp_path / "cache" / "gpu_blocks.json"


@pytest.fixture(autouse=True, scope="module")
def quick_compiles() -> Iterator[None]:
    """Nothing is timed here."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def forget_files() -> Iterator[None]:
    yield
    gpu_blocks.forget_files()


def timer_that_likes(wanted: Callable[[Any, int], float]) -> Callable[..., float]:
    """A timer that runs nothing: seconds by blocks and number of rows."""

    def timer(fn: Any, args: tuple[Any, ...]) -> float:
        blocks, num_rows = fn.keywords["blocks"], args[2].shape[0]
        return wanted(blocks.decode if fn.keywords["max_q_len"] == 1 else blocks.extend, num_rows)

    return timer


def likes_one_stage(blocks: Any, num_rows: int) -> float:
    if isinstance(blocks, ExtendBlocks):
        return 5.0 + (blocks.num_stages != 1) + (blocks.block_len != 32)
    # Few rows want to be split, many don't; twice as much hangs on the first.
    splits = blocks.num_splits if num_rows > 1 else 8 / blocks.num_splits
    return 1.0 + (blocks.num_stages != 1) + (blocks.block_len != 16) + splits / 100


@pytest.fixture(scope="module")
def tuned() -> list[tune_module.Tuned]:
    return tune(SHAPE, candidates=CANDIDATES, timer=timer_that_likes(likes_one_stage), interpret=True)


def test_the_quickest_blocks_are_found(tuned: list[tune_module.Tuned]) -> None:
    decode, extend = tuned
    assert isinstance(decode.best, DecodeBlocks)
    assert (decode.best.block_len, decode.best.num_warps, decode.best.num_stages) == (16, 4, 1)
    assert extend.best == ExtendBlocks(num_rows=16, block_len=32, num_warps=4, num_stages=1)
    assert extend.best_s == 5.0
    assert decode.best_s < decode.before_s
    assert [one.num_faults for one in tuned] == [0, 0]


def test_an_entry_is_what_the_kernels_read(tuned: list[tune_module.Tuned], user_file: Path) -> None:
    entries = [one.entry for one in tuned]
    assert entries[0] == {
        "kernel": "decode", **KEYS, "block_len": 16, "num_warps": 4, "num_stages": 1, "programs": entries[0]["programs"]
    }  # fmt: skip
    assert write_choices("NVIDIA H200", entries) == user_file
    chosen = choose_blocks(
        head_dim=16,
        num_heads=4,
        num_kv_heads=2,
        q_dtype="float32",
        pool_dtype="float32",
        num_rows=3,
        visible_len=48,
        devices=("NVIDIA H200",),
    )
    assert chosen == GpuBlocks(tuned[0].best, tuned[1].best)


def test_a_wrong_choice_and_one_that_does_not_compile_are_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = tune_module.paged_attention_gpu

    def kernels(q: jax.Array, *rest: Any, blocks: GpuBlocks, **keywords: Any) -> Any:
        tile = blocks.decode if keywords["max_q_len"] == 1 else blocks.extend
        if tile.block_len == 32:
            raise RuntimeError("ptxas: too much shared memory\nand more")
        if tile.num_stages == 2:
            return right(q, *rest, blocks=blocks, **keywords) * 1.02
        if tile.num_stages == 3:
            return right(q, *rest, blocks=blocks, **keywords).at[0, 0, 0].set(jnp.nan)
        return right(q, *rest, blocks=blocks, **keywords)

    in_use = GpuBlocks(DecodeBlocks(16, 2, 4, 4), ExtendBlocks(16, 16, 4, 4))
    monkeypatch.setattr(tune_module, "paged_attention_gpu", kernels)
    monkeypatch.setattr(tune_module, "choose_blocks", lambda **_: in_use)
    trials: list[Trial] = []
    candidates = dataclasses.replace(CANDIDATES, num_stages=(1, 2, 3), programs=(6,))
    # The faulty ones would be the quickest.
    timer = timer_that_likes(
        lambda blocks, _: 9.0 - blocks.num_stages - 5 * (blocks.block_len == 32) + 7 * (blocks.num_stages == 4)
    )
    decode, extend = tune(SHAPE, candidates=candidates, timer=timer, interpret=True, on_trial=trials.append)
    assert decode.best.num_stages == extend.best.num_stages == 1
    assert decode.num_faults == extend.num_faults == 5
    faults = {trial.fault for trial in trials if trial.seconds is None}
    assert "RuntimeError: ptxas: too much shared memory" in faults
    assert any("is off by nan" in fault for fault in faults)
    assert any(fault.startswith("is off by 0.") for fault in faults)


def test_blocks_in_use_that_are_wrong_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = tune_module.paged_attention_gpu
    monkeypatch.setattr(tune_module, "paged_attention_gpu", lambda *args, **given: right(*args, **given) + 1)
    with pytest.raises(ValueError, match=r"the decode blocks in use, DecodeBlocks.* fail here: is off by 1"):
        tune(SHAPE, candidates=CANDIDATES, timer=timer_that_likes(likes_one_stage), interpret=True)


def test_the_best_in_use_already_needs_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tune_module, "choose_blocks", lambda **_: GpuBlocks(DecodeBlocks(16, 3, 4, 4), ExtendBlocks(16, 16, 4, 4))
    )
    timer = timer_that_likes(lambda blocks, _: float(blocks.num_stages != 4))
    found = tune(SHAPE, candidates=dataclasses.replace(CANDIDATES, block_len=(16,)), timer=timer, interpret=True)
    # Of decode, the stages in use are none of the candidates, but the trial of them counts too.
    assert [one.entry for one in found] == [None, None]
    assert [one.best for one in found] == [one.before for one in found]


def entry(kernel: str = "extend", **fields: int) -> dict[str, Any]:
    return {"kernel": kernel, **KEYS, "num_rows": 16, "block_len": 16, "num_warps": 4, "num_stages": 2, **fields}


def test_a_file_keeps_what_is_about_other_calls(user_file: Path) -> None:
    write_choices("NVIDIA L4", [entry()])
    write_choices("NVIDIA H200", [entry(lanes=64), entry(block_len=32)])
    write_choices("NVIDIA H200", [entry(block_len=64)])
    kept = json.loads(user_file.read_text())
    assert kept == {"NVIDIA L4": [entry()], "NVIDIA H200": [entry(block_len=64), entry(lanes=64)]}
    assert [path.name for path in user_file.parent.iterdir()] == ["gpu_blocks.json"]


def test_what_can_not_be_read_back_is_not_written(user_file: Path) -> None:
    write_choices("NVIDIA L4", [entry()])
    before = user_file.read_text()
    with pytest.raises(ValueError, match="no power of two"):
        write_choices("NVIDIA L4", [entry(block_len=48)])
    assert user_file.read_text() == before
    user_file.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        write_choices("NVIDIA L4", [entry()])
    assert user_file.read_text() == "{"
    assert [path.name for path in user_file.parent.iterdir()] == ["gpu_blocks.json"]


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="tune measures on a GPU, and jax sees none here; nothing was written"):
        check_device()
