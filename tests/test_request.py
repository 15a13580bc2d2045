"""SamplingParams: defaults, what is refused and in which words."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from plain_modules import plain_module

from radix_jax import SamplingParams
from radix_jax.request import Request

# Of the module without runtime type checks, so that a wrong type reaches the checks of SamplingParams.
PlainParams = plain_module("request").SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.ignore_eos) == (16, 0, None, False)
    assert params.stop_token_ids == ()


def test_it_is_frozen_and_takes_keywords_alone() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        PlainParams(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 is outside \[0.0, inf\]"),
        ({"temperature": math.nan}, "temperature=nan is not a finite number"),
        ({"temperature": math.inf}, "temperature=inf is not a finite number"),
        ({"temperature": 10**400}, "temperature=10+ is not a finite number"),
        ({"temperature": "1"}, "temperature='1' is not a finite number"),
        ({"temperature": True}, "temperature=True is not a finite number"),
        ({"top_p": 0.0}, r"top_p=0.0 keeps no token; use a value in \(0, 1\], or temperature=0 for greedy"),
        ({"top_p": 1.01}, r"top_p=1.01 is outside \[0.0, 1.0\]"),
        ({"top_p": -1.0}, r"top_p=-1.0 is outside"),
        ({"min_p": 1.5}, r"min_p=1.5 is outside \[0.0, 1.0\]"),
        ({"min_p": None}, "min_p=None is not a finite number"),
        ({"top_k": -2}, "top_k=-2 is below its least value -1"),
        ({"top_k": 1.5}, "top_k=1.5 is not an int"),
        ({"max_tokens": 0}, "max_tokens=0 is below its least value 1"),
        ({"max_tokens": 2.0}, "max_tokens=2.0 is not an int"),
        ({"seed": -1}, "seed=-1 is below its least value 0"),
        ({"seed": 2**63}, f"seed={2**63} is above its largest value {2**63 - 1}"),
        ({"seed": True}, "seed=True is not an int"),
        ({"ignore_eos": 1}, "ignore_eos=1 is not a bool"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1 is not a bool"),
        ({"n": 0}, "n=0 is below its least value 1"),
        ({"n": True}, "n=True is not an int"),
        ({"n": 2.0}, "n=2.0 is not an int"),
        ({"stop": ""}, "a stop string is empty, which every text begins with; leave it out"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"stop": ["a", 5]}, "stop entry 5 is not a str"),
        ({"stop": [b"a"]}, "stop entry b'a' is not a str"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids entry=-1 is below its least value 0"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids entry='5' is not an int"),
        ({"min_tokens": -1}, "min_tokens=-1 is below its least value 0"),
        ({"min_tokens": 17}, "min_tokens=17 is above max_tokens=16; lower it"),
        ({"presence_penalty": 2.1}, r"presence_penalty=2.1 is outside \[-2.0, 2.0\]"),
        ({"presence_penalty": None}, "presence_penalty=None is not a finite number"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty=-2.1 is outside \[-2.0, 2.0\]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan is not a finite number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 divides by zero; use a value above 0, 1 for none"),
        ({"repetition_penalty": -1.0}, r"repetition_penalty=-1.0 is outside \[0.0, inf\]"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf is not a finite number"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias id=-1 is below its least value 0"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias id='5' is not an int"),
        ({"logit_bias": {True: 1.0}}, "logit_bias id=True is not an int"),
        ({"logit_bias": {5: 100.5}}, r"logit_bias of 5=100.5 is outside \[-100.0, 100.0\]"),
        ({"logit_bias": {5: -math.inf}}, "logit_bias of 5=-inf is not a finite number"),
        ({"logprobs": 21}, "logprobs=21 is above its largest value 20"),
        ({"logprobs": -1}, "logprobs=-1 is below its least value 0"),
        ({"logprobs": True}, "logprobs=True is not an int"),
        ({"logprobs": 1.0}, "logprobs=1.0 is not an int"),
    ],
)
def test_what_is_out_of_range_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlainParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "min_tokens": 0, "stop": (), "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"stop": None, "stop_token_ids": None, "logit_bias": None, "logprobs": None, "prompt_logprobs": None},
        {"stop": [], "logit_bias": {}},
        {"top_k": -1, "max_tokens": None, "seed": 2**63 - 1, "top_p": 1.0, "min_p": 1.0, "temperature": 0.0},
        {"temperature": 0, "top_p": 1},
    ],
)
def test_what_has_no_effect_is_taken(fields: dict[str, Any]) -> None:
    PlainParams(**fields)


def test_stop_strings_become_a_tuple() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == SamplingParams().stop == ()
    assert dataclasses.replace(SamplingParams(stop="ab"), n=2).stop == ("ab",)
    assert PlainParams(stop=iter(["ab", "c"])).stop == ("ab", "c")


def test_stop_token_ids_become_a_tuple() -> None:
    assert SamplingParams(stop_token_ids=[7, 9]).stop_token_ids == (7, 9)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    # What can be read once, and what has no truth value, loses nothing.
    assert PlainParams(stop_token_ids=iter([7, 9])).stop_token_ids == (7, 9)
    assert PlainParams(stop_token_ids=np.array([0], object)).stop_token_ids == (0,)


def test_a_bias_is_copied() -> None:
    given = {5: 1.0}
    params = SamplingParams(logit_bias=given)
    given[6] = 2.0
    assert params.logit_bias == {5: 1.0}
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_a_request_knows_its_length_and_is_itself_alone() -> None:
    fields: dict[str, Any] = {
        "request_id": "0",
        "token_ids": np.arange(5, dtype=np.int32),
        "sampling": SamplingParams(),
        "max_tokens": 3,
        "stop_ids": frozenset(),
        "seed": 1,
        "arrival": 0,
    }
    request = Request(**fields)
    assert request.prompt_len == 5
    assert request != Request(**fields)


@pytest.mark.parametrize(
    ("params", "stop_ids", "adjusts", "min_len"),
    [
        ({}, (3,), False, 0),
        ({"repetition_penalty": 0.5}, (), True, 0),
        ({"presence_penalty": -0.5}, (), True, 0),
        ({"frequency_penalty": 0.5}, (), True, 0),
        ({"logit_bias": {0: 0.0}}, (), True, 0),
        ({"min_tokens": 2}, (3,), False, 7),
        ({"min_tokens": 2}, (), False, 0),
    ],
)
def test_a_request_knows_what_changes_its_logits(
    params: dict[str, Any], stop_ids: tuple[int, ...], adjusts: bool, min_len: int
) -> None:
    request = Request(
        request_id="0",
        token_ids=np.arange(5, dtype=np.int32),
        sampling=SamplingParams(**params),
        max_tokens=3,
        stop_ids=frozenset(stop_ids),
        seed=1,
        arrival=0,
    )
    assert (request.adjusts_logits, request.min_len) == (adjusts, min_len)
