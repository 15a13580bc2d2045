"""The pure core lowers for accelerators that are not there, in the shapes of a real model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.arrays import StepInputs
from radix_jax.functional import decode, init_kv, prefill
from radix_jax.models.base import ModelParams
from radix_jax.models.llama import Llama
from radix_jax.models.registry import params_of

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

SMOLLM2 = MODEL_SHAPES["smollm2-135m"]
NUM_PAGES, PAGE_SIZE = 65, 16


@pytest.fixture(scope="module")
def params() -> ModelParams:
    return params_of(Llama(SMOLLM2, rngs=nnx.Rngs(0)))


def padding_inputs(num_tokens: int, num_rows: int) -> StepInputs:
    """Shapes of a step; a lowering reads no values."""
    return StepInputs(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        page_table=np.zeros((num_rows, 32), np.int32),
        kv_lens=np.zeros(num_rows, np.int32),
        cu_q_lens=np.zeros(num_rows + 1, np.int32),
        write_slots=SMOLLM2.num_layers * NUM_PAGES * PAGE_SIZE + np.arange(num_tokens, dtype=np.int32),
    )


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
@pytest.mark.parametrize(("step", "num_tokens", "num_rows"), [(prefill, 256, 8), (decode, 64, 64)])
def test_full_model_lowers(
    step: Callable[..., Any], num_tokens: int, num_rows: int, platform: str, params: ModelParams
) -> None:
    kv = init_kv(SMOLLM2, NUM_PAGES, PAGE_SIZE, "float32" if platform == "cpu" else "bfloat16")
    jitted = jax.jit(
        lambda leaves, kv, inputs: step(jax.tree.unflatten(structure, leaves), kv, inputs), donate_argnums=1
    )
    leaves, structure = jax.tree.flatten(params)
    inputs = padding_inputs(num_tokens, num_rows)
    exported = jax.export.export(jitted, platforms=[platform])(leaves, kv, inputs)
    assert exported.platforms == (platform,)
    kv_out, logits = exported.out_avals
    assert (kv_out.shape, kv_out.dtype) == (kv.shape, kv.dtype)
    assert (logits.shape, logits.dtype) == ((num_rows, SMOLLM2.vocab_size), jnp.float32)
