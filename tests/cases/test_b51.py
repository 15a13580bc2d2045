"""The frequencies of Llama 3's scaled rope, pair by pair."""

from typing import Any

import numpy as np
import pytest

from radix_jax.models.layers import RopeConfig, parse_rope, rope_frequencies

HEAD_DIM = 128
THETA = 5e5
FACTORS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPELLINGS: dict[str, dict[str, Any]] = {
    "rope_type": {"rope_theta": THETA, "rope_scaling": {"rope_type": "llama3", **FACTORS}},
    "type": {"rope_theta": THETA, "rope_scaling": {"type": "llama3", **FACTORS}},
    "rope_parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": THETA, **FACTORS}},
    "both_types": {"rope_theta": THETA, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **FACTORS}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_llama3_factors_are_applied(spelling: str) -> None:
    scaled = rope_frequencies(parse_rope(SPELLINGS[spelling]), HEAD_DIM)
    plain = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert scaled.shape == (64,)
    np.testing.assert_allclose(scaled[:29], plain[:29], rtol=1e-6)
    assert plain[29] == pytest.approx(2.616099253e-03, rel=1e-9)
    assert scaled[29] == pytest.approx(2.166570764e-03, rel=1e-6)
    assert scaled[33] == pytest.approx(3.126937504e-04, rel=1e-6)
    np.testing.assert_allclose(scaled[35:], plain[35:] / 8, rtol=1e-6)


def test_the_blend_lies_between() -> None:
    scaled = rope_frequencies(parse_rope(SPELLINGS["rope_type"]), HEAD_DIM)
    plain = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    blended = slice(29, 35)
    assert np.all(scaled[blended] < plain[blended])
    assert np.all(scaled[blended] > plain[blended] / 8)
    assert np.all(np.diff(scaled) < 0)


def test_linear_divides_every_frequency() -> None:
    linear = rope_frequencies(parse_rope({"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 4.0}}), 64)
    np.testing.assert_allclose(linear, rope_frequencies(RopeConfig(theta=THETA), 64) / 4, rtol=1e-7)


@pytest.mark.parametrize("absent", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_no_scaling_is_plain(absent: dict[str, Any]) -> None:
    assert parse_rope({"rope_theta": THETA, **absent}) == RopeConfig(theta=THETA)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        parse_rope({"rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize("missing", FACTORS)
def test_a_missing_factor_is_named(missing: str) -> None:
    scaling = {"rope_type": "llama3", **{name: value for name, value in FACTORS.items() if name != missing}}
    with pytest.raises(ValueError, match=missing):
        parse_rope({"rope_scaling": scaling})
