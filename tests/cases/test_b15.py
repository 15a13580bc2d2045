"""A config that names a sliding window which no layer uses loses no context."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paging import chunked_logits, shuffled_pages
from twins import TWINS, load_params, load_twin, prefill_step

from radix_jax.functional import init_kv
from radix_jax.models.llama import parse_config

TWIN = "gqa"
PROMPT_LEN = 40
NUM_LAYERS = 3
WINDOW = 8
UNUSED_WINDOWS: dict[str, dict[str, Any]] = {
    "all_layers_full": {"sliding_window": WINDOW, "layer_types": ["full_attention"] * NUM_LAYERS},
    "switched_off": {"sliding_window": WINDOW, "use_sliding_window": False},
    "switched_off_and_full": {
        "sliding_window": WINDOW,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * NUM_LAYERS,
    },
    "null": {"sliding_window": None},
}
USED_WINDOWS: dict[str, dict[str, Any]] = {
    "every_layer": {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * NUM_LAYERS},
    "one_layer": {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "switched_on": {"sliding_window": WINDOW, "use_sliding_window": True},
    "not_said": {"sliding_window": WINDOW},
}


def logits_of(folder: Path) -> np.ndarray:
    _, params = load_params(folder)
    token_ids = load_twin(TWIN).token_ids[:PROMPT_LEN]
    kv = init_kv(params.config, num_pages=16, page_size=4)
    return chunked_logits(prefill_step(params), kv, token_ids, shuffled_pages(PROMPT_LEN, 4, 16))


@pytest.mark.parametrize("keys", UNUSED_WINDOWS.values(), ids=UNUSED_WINDOWS.keys())
def test_an_unused_window_changes_nothing(keys: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TWINS / TWIN, folder)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | keys))
    logits = logits_of(folder)
    np.testing.assert_array_equal(logits, logits_of(TWINS / TWIN))
    np.testing.assert_allclose(logits, load_twin(TWIN).logits[:PROMPT_LEN], rtol=0, atol=1e-4)


@pytest.mark.parametrize("keys", USED_WINDOWS.values(), ids=USED_WINDOWS.keys())
def test_a_used_window_is_refused(keys: dict[str, Any]) -> None:
    """It is not built, and attending over everything instead would be silently wrong."""
    with pytest.raises(ValueError, match="sliding_window=8"):
        parse_config(load_twin(TWIN).hf_config | keys)
