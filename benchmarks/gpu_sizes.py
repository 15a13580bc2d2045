"""What a check of a GPU runs on: shapes sized for a data-center GPU, to be replaced by tiny ones on a CPU."""

from dataclasses import dataclass
from typing import Any

from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.config import EngineConfig
from radix_jax.plan import Bucket

# What a model of 8 billion parameters, its pool and a second pool to time steps on take, and some.
MODEL_MEMORY_BYTES = 60 * 10**9
POOL_SHARE = 0.1
LARGE_POOL_SHARE = 0.4
# (dtype, pages of 64 tokens of 8 heads of 128): past 2**31 elements in 2 bytes; past 2**31 bytes in 1, and past 2**32.
LARGE_POOLS = (("bfloat16", 40000), ("float8_e4m3fn", 24576), ("float8_e4m3fn", 36864))


@dataclass(frozen=True)
class ExtendShape:
    """`num_rows` rows of `q_len` new tokens each, over a cached prefix of `prefix_len`."""

    num_rows: int
    q_len: int
    prefix_len: int

    @property
    def name(self) -> str:
        """Rows x new tokens, and the prefix where there is one; of a decode step, rows x context."""
        if self.q_len == 1:
            return f"{self.num_rows}x{self.prefix_len + 1:,}"
        return f"{self.num_rows}x{self.q_len:,}" + (f" over {self.prefix_len:,}" if self.prefix_len else "")

    def num_slots(self, page_size: int) -> int:
        """Token slots of all its pages."""
        return self.num_rows * -(-(self.prefix_len + self.q_len) // page_size) * page_size


@dataclass(frozen=True)
class ModelSizes:
    """The model whose steps are timed, and the engine around it.

    shape: a model config. settings: of the engine. decode: (rows, context) of steps. prefill_len: tokens of one row.
    workload: of the offline benchmark. buckets: those that it needs, compiled ahead.
    """

    shape: Any
    settings: EngineConfig
    decode: tuple[tuple[int, int], ...]
    prefill_len: int
    workload: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class GpuSizes:
    """All sizes of a check.

    interpret: run the kernels by interpretation, for a test without a GPU. pool_slots: token slots of the pool that is
    attended over, all its layers together. decode: (rows, context) pairs; `swept`, the first of them, also gets
    other page sizes and baselines. large_pools: (dtype, pages) of pools whose offsets need care.
    """

    interpret: bool = False
    dtype: str = "bfloat16"
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    pool_slots: int = 2**21
    small_pool_slots: int = 2**19
    decode: tuple[tuple[int, int], ...] = ((64, 4096), (64, 1024), (1, 4096), (64, 16384))
    swept: tuple[int, int] = (64, 4096)
    page_sizes: tuple[int, ...] = (1, 64)
    extend: tuple[ExtendShape, ...] = (ExtendShape(8, 2048, 0), ExtendShape(8, 512, 4096))
    write_tokens: tuple[int, ...] = (64, 2048)
    write_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    write_pool_slots: int = 2**18
    matmul_size: int = 8192
    copy_bytes: int = 2**31
    num_variants: int = 9
    program_s: float = 1e-3
    max_chain_len: int = 64
    large_page_size: int = 64
    large_pools: tuple[tuple[str, int], ...] = LARGE_POOLS
    model: ModelSizes | None = None

    @property
    def width(self) -> int:
        """Lanes of a token in the pool."""
        return 2 * self.num_kv_heads * self.head_dim

    def chain_len(self, expected_s: float) -> int:
        """Calls in a program that then takes about `program_s`."""
        return max(2, min(self.max_chain_len, int(self.program_s / expected_s)))


def full_sizes(memory_bytes: int, dtype: str) -> GpuSizes:
    """The sizes for a GPU of `memory_bytes`, as many as jax may take of it. One of 80 GB or more gets them all; with
    less, the pools are smaller, and the longest shapes and the model are left out."""
    sizes = GpuSizes(dtype=dtype)
    slot_bytes = sizes.width * 2
    fitting = int(memory_bytes * POOL_SHARE) // slot_bytes
    pool_slots = min(sizes.pool_slots, 1 << (max(1, fitting).bit_length() - 1))
    page_bytes = sizes.large_page_size * slot_bytes
    return GpuSizes(
        dtype=dtype,
        pool_slots=pool_slots,
        small_pool_slots=min(sizes.small_pool_slots, pool_slots),
        write_pool_slots=min(sizes.write_pool_slots, pool_slots),
        large_pools=tuple(pool for pool in LARGE_POOLS if pool[1] * page_bytes <= memory_bytes * LARGE_POOL_SHARE),
        model=llama3_8b_sizes() if memory_bytes >= MODEL_MEMORY_BYTES else None,
    )


def llama3_8b_sizes() -> ModelSizes:
    """Llama 3 8B on 64 rows of up to 2,048 tokens."""
    pages = 128
    settings = EngineConfig(
        page_size=16,
        num_pages=64 * pages + 1,
        max_model_len=pages * 16,
        max_running_requests=64,
        max_prefill_tokens=2048,
    )
    return ModelSizes(
        shape=MODEL_SHAPES["llama3-8b"],
        settings=settings,
        decode=((64, 1024), (1, 1024)),
        prefill_len=2048,
        workload="shared",
        buckets=(
            Bucket("decode", 64, 64, pages),
            Bucket("prefill", 2048, 8, pages),
            Bucket("decode", 8, 8, pages),
            Bucket("prefill", 2048, 64, pages),
            Bucket("prefill", 512, 64, pages),
            Bucket("decode", 32, 32, pages),
        ),
    )
