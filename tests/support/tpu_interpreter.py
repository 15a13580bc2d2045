"""The TPU interpreter as tests of kernels run it: VMEM starts as NaN, copies are late, races are told of."""

from typing import Any

import pytest
from jax.experimental.pallas import tpu as pltpu

# Of as many parts is a clock, of which each copy ticks one at random. Of the usual 2 all copies share the second, and
# two of them that are under way together seem to be one after the other.
CLOCK_SIZE = 64
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", vector_clock_size=CLOCK_SIZE)


def assert_no_race(capsys: pytest.CaptureFixture[Any]) -> None:
    """jax 0.10 prints races; 0.12 raises them where they are found."""
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed, printed
