"""A named model is loaded in the type that is asked for, every leaf of it."""

import dataclasses
from pathlib import Path

import jax
import pytest
from tiny import SMALL, TINY
from tiny_llm import write_folder

from radix_jax import LLM


@pytest.mark.parametrize(("dtype", "expected"), [(None, "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")])
@pytest.mark.parametrize("tied", [False, True])
def test_leaves_have_the_type_asked_for(tmp_path: Path, dtype: str | None, expected: str, tied: bool) -> None:
    folder = write_folder(tmp_path, dataclasses.replace(TINY, tie_word_embeddings=tied))
    with LLM(folder, dtype=dtype, **SMALL) as llm:
        assert {leaf.dtype.name for leaf in jax.tree.leaves(llm.engine.params)} == {expected}
        assert llm.engine.config.dtype == expected
        # On a CPU the pool stays float32, whatever the weights are.
        assert llm.engine.runner.kv.dtype == llm.engine.config.kv_dtype == "float32"
