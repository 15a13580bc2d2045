"""Copying pages inside the pool: every layer, sources as they were, padding dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radix_jax.pallas_kernels.paged_attention import copy_pages

NUM_LAYERS, NUM_PAGES, PAGE_SIZE, WIDTH = 3, 5, 2, 4
PAD = NUM_PAGES


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([1], [2]),
        ([1, 4, 2], [3, 1, 4]),  # each source is another one's target, and is read before
        ([2, 2, 2], [1, 3, 4]),
        ([1, 0, 0, 0], [4, PAD, PAD, PAD]),
        ([0, 0, 3, 0, 0, 0, 0, 0], [PAD, PAD, 1, PAD, PAD, PAD, PAD, PAD]),  # more padding than pages
        ([0, 0], [PAD, PAD]),
    ],
)
@pytest.mark.parametrize("donate", [False, True])
def test_pages_of_every_layer(sources: list[int], targets: list[int], donate: bool) -> None:
    before = np.random.default_rng(0).standard_normal((NUM_LAYERS * NUM_PAGES, PAGE_SIZE, WIDTH)).astype(np.float32)
    expected = before.copy()
    for source, target in zip(sources, targets, strict=True):
        for layer in range(NUM_LAYERS):
            if target != PAD:
                expected[layer * NUM_PAGES + target] = before[layer * NUM_PAGES + source]
    copy = jax.jit(copy_pages, static_argnames="num_layers", donate_argnums=0 if donate else ())
    after = copy(jnp.array(before), jnp.array(sources), jnp.array(targets), num_layers=NUM_LAYERS)
    np.testing.assert_array_equal(after, expected)
