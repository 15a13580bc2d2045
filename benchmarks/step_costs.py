"""What steps cost on this machine, for `radix-jax replay`: python -m benchmarks.step_costs --model NAME [--json]

Runs the offline workloads with every bucket compiled and one step at a time, takes the seconds of each step, and fits
the linear cost model of the replay to them. Prints the options that give a replay those costs.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.offline import MAX_MODEL_LEN, MODEL, POOL_TOKENS, run_waves
from benchmarks.workloads import WORKLOADS
from radix_jax import LLM, Engine
from radix_jax.plan import StepPlan
from radix_jax.replay import CostModel, StepCounts
from radix_jax.runner import StepHandle, StepTokens

Measured = list[tuple[StepCounts, float]]


class StepTimer:
    """Stands between an engine without overlap and its runner, and notes counts and seconds of each step."""

    def __init__(self, engine: Engine) -> None:
        if engine.config.overlap:
            raise ValueError("overlap=True hides one step behind another; time an engine with overlap=False")
        self.measured: Measured = []
        self._runner = engine.runner
        self._dispatch, self._read = engine.runner.dispatch, engine.runner.read
        self._counts, self._began_s = StepCounts(0, 0, 0, 0), 0.0
        setattr(engine.runner, "dispatch", self._timed_dispatch)  # noqa: B010 - a method, for as long as this stands
        setattr(engine.runner, "read", self._timed_read)  # noqa: B010

    def _timed_dispatch(self, plan: StepPlan) -> StepHandle:
        self._counts, self._began_s = StepCounts.of(plan), time.perf_counter()
        return self._dispatch(plan)

    def _timed_read(self, handle: StepHandle) -> StepTokens:
        tokens = self._read(handle)
        self._runner.kv.block_until_ready()  # a chunk that samples nothing is not waited for otherwise
        self.measured.append((self._counts, time.perf_counter() - self._began_s))
        return tokens


def measure(engine: Engine, workloads: Sequence[str]) -> Measured:
    """Counts and seconds of every step of the workloads, each from an empty cache."""
    engine.warm_up()
    timer = StepTimer(engine)
    for workload in workloads:
        engine.flush_cache()
        run_waves(engine, WORKLOADS[workload]())
    return timer.measured


def relative_error(costs: CostModel, measured: Measured) -> float:
    """Of the sum of all steps, how far the costs miss each step on average."""
    missed_s = sum(abs(costs.seconds_s(counts) - seconds_s) for counts, seconds_s in measured)
    return missed_s / sum(seconds_s for _, seconds_s in measured)


def main() -> None:
    """Measure, fit and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_costs", description="What steps cost here.")
    parser.add_argument("--model", default=MODEL, help="name, hub id, folder or .gguf file (default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, with commas (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    options = parser.parse_args()
    config = {"num_pages": POOL_TOKENS // 16 + 1, "max_model_len": MAX_MODEL_LEN, "overlap": False}
    with LLM(options.model, **config) as llm:
        measured = measure(llm.engine, options.workloads.split(","))
    costs = CostModel.fit(measured)
    error = relative_error(costs, measured)
    if options.json:
        print(json.dumps({"benchmark": "step_costs", "num_steps": len(measured), "error": error, **asdict(costs)}))
        return
    print(" ".join(f"--{name.replace('_', '-')} {value:.3g}" for name, value in asdict(costs).items()))
    print(f"{len(measured)} steps, which these miss by {error:.0%} on average")


if __name__ == "__main__":
    main()
