"""Facts of GPUs that are not there."""

import pytest

from radix_jax.aot.targets import target_of, targets


def test_an_h200() -> None:
    target = target_of("h200")
    assert (target.architecture, target.num_cores) == ("sm_90a", 132)
    assert target.block_names == ("NVIDIA H200", "sm_90", "sm_9")
    assert target.flop_per_s(2) > target.flop_per_s(4)


@pytest.mark.parametrize("name", ["h200", "h100", "a100", "l4", "rtx4090"])
def test_the_description_holds_the_facts(name: str) -> None:
    target = target_of(name)
    text = target.description()
    assert text.count("{") == text.count("}")
    major, minor = target.capability.rstrip("a").split(".")
    for line in (
        f"core_count: {target.num_cores}",
        f"shared_memory_per_block_optin: {target.shared_bytes_per_kernel}",
        f"cuda_compute_capability {{ major: {major} minor: {minor} }}",
        f'name: "{target.device_kind}"',
        "dnn_version_info { major: 9 minor: 12 patch: 0 }",
    ):
        assert line in text
    assert target.shared_bytes_per_kernel < target.shared_bytes_per_core
    assert target.block_names[1].removeprefix("sm_") == major + minor


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_threads", "expected"),
    [
        (128, 0, 128, 4),  # 65,536 registers / (128 * 128)
        (129, 0, 128, 3),  # allotted as 136
        (32, 76800, 128, 3),  # 233,472 bytes / (76,800 + 1,024)
        (32, 76801, 128, 2),
        (16, 0, 1024, 2),  # 2,048 threads
    ],
)
def test_the_scarcest_bounds_the_programs(registers: int, shared_bytes: int, num_threads: int, expected: int) -> None:
    programs = target_of("h200").programs_per_core(
        registers=registers, shared_bytes=shared_bytes, num_threads=num_threads
    )
    assert programs == expected


def test_an_unknown_target_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'tpu9' is not one of h200, h100, a100, l4, rtx4090"):
        target_of("tpu9")
    assert all(target.name == name for name, target in targets().items())
