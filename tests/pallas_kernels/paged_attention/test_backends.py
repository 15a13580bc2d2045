"""Which backend is chosen on which device, and why."""

from dataclasses import dataclass
from typing import Any

import pytest

from radix_jax.pallas_kernels.paged_attention import attention_backend


@dataclass(frozen=True)
class Device:
    """What a jax.Device says of itself."""

    platform: str
    device_kind: str = "some chip"
    compute_capability: Any = None


H200 = Device("gpu", "NVIDIA H200", "9.0")
T4 = Device("gpu", "Tesla T4", "7.5")


@pytest.mark.parametrize(
    ("device", "backend", "reason"),
    [
        (H200, "pallas_gpu", "NVIDIA H200 has compute capability 9.0"),
        (Device("gpu", "NVIDIA A100", "8.0"), "pallas_gpu", "NVIDIA A100 has compute capability 8.0"),
        (Device("gpu", "NVIDIA B200", "10.0"), "pallas_gpu", "NVIDIA B200 has compute capability 10.0"),
        (T4, "xla", "Tesla T4 has compute capability 7.5, the kernels need 8.0"),
        (Device("gpu", "MI300X", "gfx942"), "xla", "the kernels are for NVIDIA GPUs, this is MI300X"),
        (Device("tpu", "TPU v4"), "pallas_tpu", "this is TPU v4"),
        (Device("tpu", "TPU v5 lite"), "pallas_tpu", "this is TPU v5 lite"),
        (Device("tpu", "TPU v6 lite"), "pallas_tpu", "this is TPU v6 lite"),
        (Device("tpu", "TPU7x"), "pallas_tpu", "this is TPU7x"),
        (Device("tpu", "TPU v3"), "xla", "the kernels are for TPU v4 and later, this is TPU v3"),
        (Device("cpu"), "xla", "the kernels are for GPUs, this is cpu"),
    ],
)
def test_the_choice_has_a_reason(device: Device, backend: str, reason: str) -> None:
    assert attention_backend("auto", device) == (backend, reason)


def test_without_a_device_it_is_the_default_one() -> None:
    assert attention_backend() == ("xla", "the kernels are for GPUs, this is cpu")


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret", "pallas_tpu_interpret"])
def test_what_runs_anywhere(backend: str) -> None:
    assert attention_backend(backend, T4) == (backend, "asked for")


def test_the_kernels_on_a_device_that_cannot_run_them() -> None:
    assert attention_backend("pallas_gpu", H200) == ("pallas_gpu", "asked for")
    with pytest.raises(ValueError, match=r"'pallas_gpu' can't run here: Tesla T4 has compute capability 7\.5"):
        attention_backend("pallas_gpu", T4)
    with pytest.raises(
        ValueError, match="'pallas_tpu' can't run here: the kernels are for TPUs, this is gpu; use auto"
    ):
        attention_backend("pallas_tpu", H200)
    assert attention_backend("pallas_gpu") == ("pallas_gpu", "asked for"), "a program may be lowered for elsewhere"


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="'flash' is not one of auto, xla, pallas_gpu, pallas_tpu, pallas_interpret"):
        attention_backend("flash")
