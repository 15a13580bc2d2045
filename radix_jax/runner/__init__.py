"""From a StepPlan to tokens: packing, the jitted steps, sampling, and the ledger of compiles."""

from radix_jax.runner.compile_ledger import CompileLedger, CompileRecord, keep_compiles, keep_engine_compiles
from radix_jax.runner.resolve import resolve_config
from radix_jax.runner.runner import SAMPLER_BUCKET, Runner, StepHandle, StepTokens

__all__ = [
    "SAMPLER_BUCKET",
    "CompileLedger",
    "CompileRecord",
    "Runner",
    "StepHandle",
    "StepTokens",
    "keep_compiles",
    "keep_engine_compiles",
    "resolve_config",
]
