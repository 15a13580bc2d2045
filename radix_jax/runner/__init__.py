"""From a StepPlan to tokens: packing, the jitted steps, sampling, and the ledger of compiles."""

from radix_jax.runner.compile_ledger import CompileLedger, CompileRecord, keep_compiles
from radix_jax.runner.resolve import resolve_config
from radix_jax.runner.runner import Runner, StepHandle

__all__ = ["CompileLedger", "CompileRecord", "Runner", "StepHandle", "keep_compiles", "resolve_config"]
