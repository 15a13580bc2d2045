"""Block choices: the shipped data, a user's own file before it, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from radix_jax.pallas_kernels.paged_attention import gpu_blocks
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import (
    FILE_NAME,
    ExtendBlocks,
    GpuBlocks,
    choose_blocks,
    forget_files,
    load_choices,
    num_splits,
)

SHIPPED = Path(gpu_blocks.__file__).with_name(FILE_NAME)


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's own choices lie; not there yet."""
    monkeypatch.setenv("RADIX_JAX_CACHE", str(tmp_path))
    forget_files()
    yield tmp_path / FILE_NAME
    forget_files()


def choose(**changed: Any) -> GpuBlocks:
    shape = {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "q_dtype": jnp.bfloat16, "pool_dtype": jnp.bfloat16}
    return choose_blocks(**{**shape, "num_rows": 64, "visible_len": 4096, "devices": (), **changed})


@pytest.mark.usefixtures("user_file")
@pytest.mark.parametrize("device", [(), ("sm_80", "sm_8"), ("sm_89", "sm_8"), ("sm_120", "sm_12"), ("some GPU",)])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 16, 48])
def test_every_shape_has_blocks(device: tuple[str, ...], head_dim: int, group_size: int) -> None:
    for q_dtype, pool_dtype in (
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.float32),
        (jnp.float16, jnp.float8_e5m2),
    ):
        blocks = choose(
            devices=device, head_dim=head_dim, num_heads=8 * group_size, q_dtype=q_dtype, pool_dtype=pool_dtype
        )
        assert blocks.extend.num_rows >= group_size


@pytest.mark.usefixtures("user_file")
def test_a_wide_pool_counts_as_wide_queries() -> None:
    """The matmuls run in float32 then, whose tiles take twice the room."""
    wide = choose(q_dtype=jnp.bfloat16, pool_dtype=jnp.float32)
    assert wide == choose(q_dtype=jnp.float32, pool_dtype=jnp.float32)
    assert wide != choose()


def test_splits_fill_the_gpu_and_its_last_wave() -> None:
    # 512 pairs on a GPU for 396: two waves for one split, four waves of a third each for three.
    assert num_splits(396, 64, 64 * 8, 4096) == 3
    # One row: a wave of 392 programs.
    assert num_splits(396, 64, 8, 4096) == 49
    # Enough pairs, or rows too short to share.
    assert num_splits(396, 64, 396 * 50, 4096) == 1
    assert num_splits(396, 64, 8, 64) == 1
    # What a table could hold doesn't count beyond usual lengths.
    assert num_splits(396, 64, 64 * 8, 1 << 20) == 3


def test_the_users_file_goes_first(user_file: Path) -> None:
    shipped = choose()
    entry = {"kernel": "extend", "lanes": 128, "num_rows": 16, "block_len": 16, "num_warps": 2, "num_stages": 1}
    user_file.write_text(json.dumps({"my GPU": [entry]}))
    forget_files()
    assert choose() == shipped
    mine = choose(devices=("my GPU", "sm_80", "sm_8"))
    assert mine.extend == ExtendBlocks(num_rows=16, block_len=16, num_warps=2, num_stages=1)
    assert mine.decode == choose(devices=("sm_80", "sm_8")).decode
    assert choose(devices=("my GPU",), head_dim=64) == choose(head_dim=64)


ENTRY = {"kernel": "extend", "num_rows": 16, "block_len": 16, "num_warps": 2, "num_stages": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "has to map a device kind to a list of entries"),
        (json.dumps({"x": [{**ENTRY, "kernel": "scan"}]}), "is of no kernel of decode, extend"),
        (json.dumps({"x": [{"kernel": "decode", "block_len": 16, "num_warps": 4}]}), "lacks num_stages, programs"),
        (json.dumps({"x": [{**ENTRY, "colour": 3}]}), "has unknown colour"),
        (json.dumps({"x": [{**ENTRY, "num_warps": 0}]}), "has num_warps=0, which is no positive integer"),
        (json.dumps({"x": [{**ENTRY, "num_warps": True}]}), "has num_warps=True, which is no positive integer"),
        (json.dumps({"x": [{**ENTRY, "block_len": 48}]}), "has block_len=48, no power of two"),
        (json.dumps({"x": [{**ENTRY, "num_rows": 8}]}), "has num_rows=8, below 16"),
    ],
)
def test_a_broken_file_is_refused(user_file: Path, content: str, reason: str) -> None:
    user_file.write_text(content)
    with pytest.raises(ValueError, match=rf"{FILE_NAME}.*{reason}.*radix-jax tune"):
        choose()


def test_the_shipped_file_is_of_the_form() -> None:
    assert set(load_choices(SHIPPED)) >= {"default", "sm_8", "sm_12"}
