"""The pytrees that cross to the device."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from radix_jax.arrays import StepInputs, register_pytree
from radix_jax.plan import Bucket
from radix_jax.runner.pack import empty_step


@register_pytree
@dataclasses.dataclass(frozen=True)
class Pair:
    first: Any
    name: str = dataclasses.field(metadata={"static": True})
    second: Any

    def __post_init__(self) -> None:
        if self.first is None:
            raise ValueError("made by hand, it needs a first")


def test_static_fields_are_structure_and_the_others_leaves() -> None:
    pair = Pair(1, "a", {"x": 2})
    leaves, structure = jax.tree.flatten(pair)
    assert leaves == [1, 2]
    assert jax.tree.unflatten(structure, [3, 4]) == Pair(3, "a", {"x": 4})
    assert structure == jax.tree.structure(Pair(0, "a", {"x": 0}))
    assert structure != jax.tree.structure(Pair(0, "b", {"x": 0}))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(pair)[0]]
    assert paths == [".first", ".second['x']"]


def test_rebuilding_does_not_run_the_constructor() -> None:
    with pytest.raises(ValueError, match="needs a first"):
        Pair(None, "a", 1)
    rebuilt = jax.tree.unflatten(jax.tree.structure(Pair(1, "a", 2)), [None, 5])
    assert (rebuilt.first, rebuilt.name, rebuilt.second) == (None, "a", 5)


def test_it_goes_through_transformations() -> None:
    doubled = jax.jit(lambda pair: jax.tree.map(lambda leaf: 2 * leaf, pair))(Pair(np.arange(3), "a", 1.0))
    assert doubled.name == "a"
    np.testing.assert_array_equal(doubled.first, [0, 2, 4])
    assert isinstance(jax.eval_shape(lambda pair: pair, doubled).first, jax.ShapeDtypeStruct)


def test_step_inputs_are_their_nine_arrays() -> None:
    inputs = empty_step(Bucket("prefill", 8, 2, 3)).inputs
    shapes = jax.tree.map(lambda leaf: leaf.shape, inputs)
    assert isinstance(shapes, StepInputs)
    assert (shapes.token_ids, shapes.page_table, shapes.cu_q_lens) == ((8,), (2, 3), (3,))
    assert len(jax.tree.leaves(inputs)) == 9
