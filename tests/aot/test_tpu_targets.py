"""Facts of TPUs that are not there."""

import pytest

from radix_jax.aot.devices import find_target
from radix_jax.aot.targets import target_of
from radix_jax.aot.tpu_targets import tpu_generations, tpu_target_of


@pytest.mark.parametrize("generation", tpu_generations())
def test_facts_fit_each_other(generation: str) -> None:
    target = tpu_target_of(generation)
    assert target.num_chips == 1
    assert target.usable_bytes < target.memory_bytes
    per_s = target.matmul_flop_per_cycle * target.cores_per_device * target.clock_ghz * 1e9
    assert target.half_flop_per_s == pytest.approx(per_s, rel=0.01)
    assert target.flop_per_s(2) == target.flop_per_s(4)


def test_a_topology_is_named_as_libtpu_names_it() -> None:
    assert tpu_target_of("v5e:2x4").topology_name == "v5e:2x4"
    assert tpu_target_of("v5e:2x4").num_chips == 8
    assert tpu_target_of("tpu7x:2x2x1").topology_name == "tpu7x:2x2x1"
    assert tpu_target_of("v7x:2x2x1").topology_name == "tpu7x:2x2x1"
    assert tpu_target_of("v7x").topology_name == "tpu7x:1x1x1"


def test_512_tokens_of_8_heads_of_128_take_3836_cycles_of_a_v5e() -> None:
    assert tpu_target_of("v5e").cycles(512 * 2 * 8 * 128 * 2) == pytest.approx(3836, abs=1)


@pytest.mark.parametrize("name", ["v5e:", "v5e:2x2x1", "v5e:0x4", "v6e:4", "tpu7x:2x2"])
def test_what_is_no_shape_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"target '{name}' has no shape of a topology behind the colon; give one as"):
        tpu_target_of(name)


def test_a_target_of_either_kind_is_found() -> None:
    assert find_target("h200") is target_of("h200")
    assert find_target("v6e:2x2") == tpu_target_of("v6e:2x2")
    with pytest.raises(ValueError, match=r"target 'v9' is not one of h200, .*, v4, v5e, v5p, v6e, v7x; a TPU may"):
        find_target("v9")
    with pytest.raises(ValueError, match="target 'v9' is not one of v4, v5e, v5p, v6e, v7x, alone or with a topology"):
        tpu_target_of("v9")
