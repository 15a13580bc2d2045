"""Ends of a sequence that only one file of a checkpoint names end the request, and their text does not leak."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from small_files import write_json
from tiny import SMALL, counting_llama, greedy
from tiny_llm import letter_core, write_weights

from radix_jax import LLM
from radix_jax.models.llama import Llama

# What the files name: config.json, generation_config.json, the tokenizer's files.
NAMED = {
    "generation_config": (5, [5, 9], 5),
    "config": ([5, 9], 5, 5),
    "tokenizer": (5, [5], 9),
    "generation_config_alone": (None, 9, None),
}


def write_counting(folder: Path, module: Llama, named: tuple[object, object, int | None]) -> Path:
    """A model that says the next number, and files that name its ends as given."""
    in_config, in_generation_config, in_tokenizer = named
    weights = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    write_weights(folder, module.config, weights, eos_token_id=in_config)
    write_json(folder / "generation_config.json", {"eos_token_id": in_generation_config})
    letter_core((5, 9)).save(str(folder / "tokenizer.json"))
    eos_token = None if in_tokenizer is None else chr(33 + in_tokenizer)
    write_json(folder / "tokenizer_config.json", {"eos_token": eos_token})
    return folder


@pytest.mark.parametrize("which", NAMED)
def test_generation_stops_at_each_named_id(tmp_path: Path, which: str) -> None:
    folder = write_counting(tmp_path, counting_llama(), NAMED[which])
    with LLM(folder, **SMALL) as llm:
        assert 9 in llm.engine.eos_token_ids
        to_nine, ignoring = llm.generate([[6], [6]], [greedy(20), greedy(6, ignore_eos=True)])
        [completion] = to_nine.outputs
        assert completion.token_ids == [7, 8, 9]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", 9)
        assert completion.text == "".join(chr(33 + token_id) for token_id in (7, 8))
        assert ignoring.outputs[0].token_ids == [7, 8, 9, 10, 11, 12]
        assert ignoring.outputs[0].finish_reason == "length"
        if which != "generation_config_alone":
            [completion] = llm.generate([3], greedy(20))[0].outputs
            assert (completion.token_ids, completion.stop_reason) == ([4, 5], 5)
