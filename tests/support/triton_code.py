"""The code of GPU kernels as Pallas gives it to Triton, for a GPU that is not there."""

from collections.abc import Callable
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from radix_jax.aot.compiling import _abstract_device
from radix_jax.aot.targets import target_of


def lowered(fn: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> jax.stages.Lowered:
    """Of an H200 that is not there."""
    with _abstract_device(target_of("h200")):
        return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",))


def triton_code(program: jax.stages.Lowered) -> dict[str, str]:
    """The code of each Triton kernel in a program, by the kernel's name."""
    calls: list[ir.DictAttr] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in op.attributes:
            calls.append(ir.DictAttr(op.attributes["mhlo.backend_config"]))
        return ir.WalkResult.ADVANCE

    program.compiler_ir().operation.walk(visit)
    found = {}
    for call in calls:
        with ir.Context() as context:
            dialect.register_dialect(context)
            context.load_all_available_dialects()
            module = ir.Module.parse(ir.StringAttr(call["ir"]).value_bytes)
            found[ir.StringAttr(call["name"]).value] = str(module)
    return found
