"""Traces run on the engine's own scheduler, tree and pool, with a virtual clock and a cost model for a device."""

from radix_jax.replay.belady import optimal_hit_tokens
from radix_jax.replay.cost_model import CostModel, StepCounts
from radix_jax.replay.report import ReplayReport, Spread, make_report
from radix_jax.replay.simulator import RequestTimes, Simulation, make_scheduler, simulate
from radix_jax.replay.sweep import SweepAxes, run_sweep
from radix_jax.replay.trace import Trace, TraceRequest
from radix_jax.replay.trace_files import read_trace

__all__ = [
    "CostModel",
    "ReplayReport",
    "RequestTimes",
    "Simulation",
    "Spread",
    "StepCounts",
    "SweepAxes",
    "Trace",
    "TraceRequest",
    "make_report",
    "make_scheduler",
    "optimal_hit_tokens",
    "read_trace",
    "run_sweep",
    "simulate",
]
