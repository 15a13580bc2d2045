"""Whole steps of a model with random weights on the device, and the offline workload on it, cache on and off."""

import dataclasses
import functools
import time
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_report import Report
from benchmarks.gpu_sizes import ModelSizes
from benchmarks.gpu_timing import Compiler, time_program
from benchmarks.offline import run_waves
from benchmarks.random_weights import random_array, random_params
from benchmarks.workloads import WORKLOADS
from radix_jax import Engine
from radix_jax.arrays import SamplerState
from radix_jax.models.base import ModelParams
from radix_jax.plan import Bucket
from radix_jax.runner.pack import PackedStep, empty_step
from radix_jax.runner.resolve import default_dtype


class ModelBench:
    """An engine over random weights whose programs are compiled ahead in threads."""

    def __init__(self, sizes: ModelSizes, compiler: Compiler) -> None:
        self._sizes = sizes
        params = random_params(sizes.shape, sizes.settings.dtype or default_dtype())
        self.engine = Engine(sizes.shape, params, sizes.settings)
        self.programs: dict[Bucket, Future[Any]] = {
            bucket: compiler.submit(self.engine.runner.compile, bucket, "warmup") for bucket in sizes.buckets
        }

    def time_steps(self, report: Report, bandwidth: float | None, peak: float | None) -> None:
        """Decode steps and a prefill step, each beside what the device could do it in."""
        sizes, kv = self._sizes, self._random_pool()
        steps = [(f"decode {rows}x{context:,}", rows, context, 1) for rows, context in sizes.decode]
        steps.append((f"prefill {sizes.prefill_len:,}", 1, sizes.prefill_len, sizes.prefill_len))
        for name, num_rows, context, q_len in steps:
            bucket = self._bucket(num_rows, q_len)
            program = self.programs[bucket]
            if report.left_s < 2.0 or not program.done() or program.cancelled():
                report.drop(name, "out of time" if program.done() else "not compiled in time")
                continue
            step, packed = program.result(), self._packed(bucket, num_rows, context, q_len)
            buffer = jnp.asarray(packed.buffer)
            last_tokens = jnp.zeros(max(b.num_rows for b in sizes.buckets if b.kind == "decode"), jnp.int32)

            pointer = kv.unsafe_buffer_pointer()
            run = functools.partial(_run_step, step, self.engine.params)
            state = jax.tree.map(jnp.zeros_like, self.engine.runner.sampler_state)
            seconds_s, (kv, _) = time_program(run, (kv, state), last_tokens, buffer, sample_s=0.05)
            floor_s = self._floor_s(num_rows, context, q_len, bandwidth, peak)
            report.row(
                step=name,
                ms=seconds_s * 1e3,
                **({} if floor_s is None else {"floor_ms": floor_s * 1e3, "share_of_floor": floor_s / seconds_s}),
                tokens_per_s=num_rows * q_len / seconds_s,
                pool_in_place=kv.unsafe_buffer_pointer() == pointer,
            )
        kv.delete()

    def run_offline(self, report: Report) -> None:
        """The workload with the cache and without. A first pass of each compiles what was not, and is not timed."""
        for cached in (True, False):
            name = f"{self._sizes.workload}, cache {'on' if cached else 'off'}"
            if report.left_s < 5.0:
                report.drop(name, "out of time")
                continue
            if not cached:
                self._restart_without_cache()
            engine = self.engine
            requests = WORKLOADS[self._sizes.workload]()
            pointer = engine.runner.kv.unsafe_buffer_pointer()
            run_waves(engine, requests)
            engine.flush_cache()
            before = engine.stats()
            began_s = time.perf_counter()
            run_waves(engine, requests)
            seconds_s = time.perf_counter() - began_s
            after = engine.stats()
            output_tokens = after.num_output_tokens - before.num_output_tokens
            report.row(
                workload=name,
                seconds=seconds_s,
                output_tokens_per_s=output_tokens / seconds_s,
                prompt_tokens=after.num_prompt_tokens - before.num_prompt_tokens,
                prefill_computed=after.num_prefill_tokens - before.num_prefill_tokens,
                output_tokens=output_tokens,
                compiles_timed=after.num_compiles - before.num_compiles,
                compiles_late=sum(record.reason == "first use" for record in engine.ledger.records),
                pool_in_place=engine.runner.kv.unsafe_buffer_pointer() == pointer,
            )

    def close(self) -> None:
        """Give the memory back."""
        self.engine.close()

    def _restart_without_cache(self) -> None:
        """Another engine over the same params. Its programs are the same: nothing in a step knows of the cache."""
        first = self.engine
        params: ModelParams = first.params
        compiled = dict(first.runner._compiled)
        first.close()
        self.engine = Engine(
            self._sizes.shape, params, dataclasses.replace(self._sizes.settings, enable_prefix_cache=False)
        )
        self.engine.runner._compiled.update(compiled)

    def _bucket(self, num_rows: int, q_len: int) -> Bucket:
        kind = "decode" if q_len == 1 else "prefill"
        fitting = [
            bucket
            for bucket in self._sizes.buckets
            if bucket.kind == kind and bucket.num_rows >= num_rows and bucket.num_tokens >= num_rows * q_len
        ]
        return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_rows))

    def _packed(self, bucket: Bucket, num_rows: int, context: int, q_len: int) -> PackedStep:
        """A step of rows that end at `context`, on pages in no order."""
        page_size = self.engine.config.page_size
        num_pages = self.engine.runner.kv.shape[0] // self._sizes.shape.num_layers
        packed = empty_step(bucket, num_slots=self.engine.runner.kv.shape[0] * page_size)
        inputs, rng = packed.inputs, np.random.default_rng(0)
        num_tokens, pages_per_row = num_rows * q_len, -(-context // page_size)
        if num_rows * pages_per_row > num_pages - 1:
            raise ValueError(f"{num_rows} rows of {context} tokens don't fit into {num_pages - 1} pages")
        pages = 1 + rng.permutation(num_pages - 1)[: num_rows * pages_per_row].reshape(num_rows, -1)
        positions = np.tile(np.arange(context - q_len, context), num_rows)
        rows = np.repeat(np.arange(num_rows), q_len)
        inputs.token_ids[:num_tokens] = rng.integers(0, self._sizes.shape.vocab_size, num_tokens)
        inputs.positions[:num_tokens] = positions
        inputs.page_table[:num_rows, :pages_per_row] = pages
        inputs.kv_lens[:num_rows] = context
        inputs.cu_q_lens[:] = np.minimum(np.arange(len(inputs.cu_q_lens)) * q_len, num_tokens)
        inputs.write_slots[:num_tokens] = pages[rows, positions // page_size] * page_size + positions % page_size
        return packed

    def _random_pool(self) -> jax.Array:
        like = self.engine.runner.kv
        make = jax.jit(random_array, static_argnames=("shape", "spread", "dtype"), out_shardings=like.sharding)
        return make(jnp.uint32(7), shape=like.shape, spread=3**0.5, dtype=like.dtype.name)

    def _floor_s(
        self, num_rows: int, context: int, q_len: int, bandwidth: float | None, peak: float | None
    ) -> float | None:
        """Reading weights and KV once, or the matmuls, whichever takes longer."""
        if not bandwidth or not peak:
            return None
        shape, params = self._sizes.shape, self.engine.params
        leaves = jax.tree.leaves(params)
        # Of an embedding that is no head, a step reads a few rows.
        unread = 0 if params.head is None else params.weights["embed"].nbytes
        weight_bytes = sum(leaf.nbytes for leaf in leaves) - unread
        kv = self.engine.runner.kv
        kv_bytes = num_rows * context * shape.num_layers * kv.shape[2] * kv.dtype.itemsize
        num_matrix = sum(leaf.size for leaf in jax.tree.leaves(params.weights["layers"]))
        num_head = params.weights["embed"].size
        seen = q_len * (context - q_len) + q_len * (q_len + 1) // 2
        flops = 2 * num_rows * (q_len * num_matrix + num_head)
        flops += 4 * num_rows * seen * shape.num_heads * shape.head_dim * shape.num_layers
        return max((weight_bytes + kv_bytes) / bandwidth, flops / peak)


def _run_step(
    step: Any, params: ModelParams, donated: tuple[jax.Array, SamplerState], last_tokens: jax.Array, buffer: jax.Array
) -> tuple[jax.Array, SamplerState]:
    return step(params, *donated, last_tokens, buffer)[:2]
