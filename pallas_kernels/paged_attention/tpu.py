"""Paged attention on a TPU, by Pallas Mosaic kernels: decode steps here, steps of longer rows by `tpu_extend`."""

from typing import Any

import jax
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.pallas_kernels.paged_attention.tpu_decode import decode
from radix_jax.pallas_kernels.paged_attention.tpu_extend import paged_attention_extend
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import TpuChip, chip_of
from radix_jax.pallas_kernels.paged_attention.tpu_write import write_kv_tpu

Result = Float[jax.Array, "T N H"] | tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"]]


def paged_attention_tpu(
    q: Float[jax.Array, "T N H"],
    kv_pages: KVPool,
    page_table: Int32[jax.Array, "B P"],
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    return_lse: bool,
    num_kv_heads: int,
    kv_scales: Float32[jax.Array, "G 2"] | None,
    max_q_len: int,
    chip: TpuChip | None = None,
    interpret: Any = False,
) -> Result:
    """See `paged_attention`. Tokens of no row come out as 0, with -inf for their log sum.

    The width of the pool is a multiple of 128 lanes, page_size a power of two from 8 on (float8: 32).
    chip: that the tiles are chosen for; None: the one at hand. interpret: as of pallas_call; InterpretParams run the
    kernels on a CPU, slowly.

    Raises:
        UnsupportedOption: a shape that the kernels can't do; the message tells the rule and the way out.
    """
    keywords = {
        "page_offset": page_offset,
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
        "return_lse": return_lse,
        "num_kv_heads": num_kv_heads,
        "kv_scales": kv_scales,
        "chip": chip_of() if chip is None else chip,
        "interpret": interpret,
    }
    rows = (page_table, kv_lens, cu_q_lens)
    if max_q_len > 1:
        return paged_attention_extend(q, kv_pages, *rows, max_q_len=max_q_len, **keywords)
    out, lse, _ = decode(q, kv_pages, *rows, new_kv=None, **keywords)
    return out if lse is None else (out, lse)


def attend_and_write_tpu(
    q: Float[jax.Array, "T N H"],
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    kv_pages: KVPool,
    page_table: Int32[jax.Array, "B P"],
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    write_slots: Int32[jax.Array, " T"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    kv_scales: Float32[jax.Array, "G 2"] | None = None,
    max_q_len: int,
    chip: TpuChip | None = None,
    interpret: Any = False,
) -> tuple[Float[jax.Array, "T N H"], KVPool]:
    """(out, pool): `write_kv`, then `paged_attention`, of the same step; one kernel where that step is a decode.

    k, v: of the step's tokens. write_slots: where they belong, which is where page_table and kv_lens say.

    Raises:
        UnsupportedOption: as `paged_attention_tpu`.
    """
    chip = chip_of() if chip is None else chip
    common = {"page_offset": page_offset, "kv_scales": kv_scales, "interpret": interpret}
    keywords = {
        **common,
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
        "return_lse": False,
        "num_kv_heads": k.shape[1],
        "chip": chip,
    }
    rows = (page_table, kv_lens, cu_q_lens)
    if max_q_len == 1:
        out, _, kv_pages = decode(q, kv_pages, *rows, new_kv=(k, v), **keywords)
        return out, kv_pages
    kv_pages = write_kv_tpu(kv_pages, k, v, write_slots, **common)
    out = paged_attention_extend(q, kv_pages, *rows, max_q_len=max_q_len, **keywords)
    assert isinstance(out, jax.Array), "without return_lse it is one array"
    return out, kv_pages
