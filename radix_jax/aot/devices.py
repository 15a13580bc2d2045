"""The accelerators that steps can be compiled for, whatever their kind."""

from radix_jax.aot.targets import Target, target_of, targets
from radix_jax.aot.tpu_targets import TpuTarget, is_tpu_target, tpu_generations, tpu_target_of

AnyTarget = Target | TpuTarget


def find_target(name: str) -> AnyTarget:
    """The GPU or TPU of that name.

    Raises:
        ValueError: an unknown name; it lists those there are.
    """
    if is_tpu_target(name):
        return tpu_target_of(name)
    if name in targets():
        return target_of(name)
    known = ", ".join((*targets(), *tpu_generations()))
    raise ValueError(f"target {name!r} is not one of {known}; a TPU may have a topology, as v5e:2x4")
