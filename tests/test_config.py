"""EngineConfig: defaults, what is refused and in which words."""

import dataclasses
import math
from typing import Any

import pytest
from plain_modules import plain_module

from radix_jax import EngineConfig

# Of the module without runtime type checks, so that a wrong type reaches the checks of EngineConfig.
PlainConfig = plain_module("config").EngineConfig


def test_defaults() -> None:
    config = EngineConfig()
    assert config.page_size == 16
    assert config.max_running_requests == 64
    assert config.max_prefill_tokens == 2048
    assert (config.schedule_policy, config.eviction_policy) == ("lpm", "reuse-rate")
    assert config.enable_prefix_cache
    assert config.attention_backend == "auto"
    assert config.warmup == "lazy"
    left_open = ("num_pages", "kv_memory_fraction", "max_model_len", "dtype", "kv_dtype", "compile_cache_dir")
    assert all(getattr(config, name) is None for name in left_open)


def test_it_is_frozen_and_takes_keywords_alone() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().page_size = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        PlainConfig(4)
    with pytest.raises(TypeError, match="page_sise"):
        PlainConfig(page_sise=4)


@pytest.mark.parametrize("name", ["page_size", "max_running_requests", "max_prefill_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, None])
def test_counts_are_ints_of_at_least_one(name: str, value: Any) -> None:
    rule = f"{name}={value} is below its least value 1" if value in (0, -1) else f"{name}={value!r} is not an int"
    with pytest.raises(ValueError) as error:
        PlainConfig(**{name: value})
    assert str(error.value) == rule


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_pages": 1}, "num_pages=1 is below its least value 2"),
        ({"num_pages": 2.0}, "num_pages=2.0 is not an int"),
        ({"max_model_len": 1}, "max_model_len=1 is below its least value 2"),
        ({"seed": -1}, "seed=-1 is below its least value 0"),
        ({"kv_memory_fraction": 0.0}, r"kv_memory_fraction=0.0 is outside \(0, 1\]"),
        ({"kv_memory_fraction": 1.1}, r"kv_memory_fraction=1.1 is outside \(0, 1\]"),
        ({"kv_memory_fraction": "a"}, r"kv_memory_fraction='a' is outside \(0, 1\]"),
        ({"kv_memory_fraction": math.nan}, r"kv_memory_fraction=nan is outside \(0, 1\]"),
        ({"num_pages": 9, "kv_memory_fraction": 0.5}, "num_pages and kv_memory_fraction both size the pool; give one"),
        ({"enable_prefix_cache": 1}, "enable_prefix_cache=1 is not a bool"),
        ({"partial_pages": "no"}, "partial_pages='no' is not a bool"),
        ({"deterministic": None}, "deterministic=None is not a bool"),
        ({"dtype": "int8"}, "dtype='int8' is not one of None, 'float32', 'bfloat16', 'float16'"),
        ({"kv_dtype": "fp8"}, "kv_dtype='fp8' is not one of None, 'float32', 'bfloat16', 'float16', 'float8_e4m3fn'"),
        ({"warmup": "never"}, "warmup='never' is not one of 'lazy', 'full'"),
        ({"schedule_policy": "best"}, "schedule_policy='best' is not one of 'lpm', 'fcfs', 'dfs-weight', 'hrrn'"),
        ({"eviction_policy": "oldest"}, "eviction_policy='oldest' is not one of 'lru', 'lfu'"),
        (
            {"attention_backend": "cuda"},
            "attention_backend='cuda' is not one of 'auto', 'xla', .*; register_attention_",
        ),
    ],
)
def test_what_is_out_of_range_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlainConfig(**fields)


@pytest.mark.parametrize(
    "policy",
    ["lpm", "fcfs", "dfs-weight", "hrrn", "shortest-prefill-first", "lof", "random", "routing-key", "priority"],
)
def test_every_built_policy_is_taken(policy: str) -> None:
    assert EngineConfig(schedule_policy=policy).schedule_policy == policy
