"""A trace under many settings, one run each."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from radix_jax.config import EngineConfig, check_int
from radix_jax.replay.cost_model import CostModel
from radix_jax.replay.report import ReplayReport, make_report
from radix_jax.replay.simulator import simulate
from radix_jax.replay.trace import Trace


@dataclass(frozen=True)
class SweepAxes:
    """The values to try; every combination is a run. pool_tokens: sizes of the pool, rounded down to whole pages."""

    schedule_policies: Sequence[str | Callable[..., Any]]
    eviction_policies: Sequence[str | Callable[..., Any]]
    page_sizes: Sequence[int]
    pool_tokens: Sequence[int]

    def configs(self, base: EngineConfig) -> list[EngineConfig]:
        """The settings of all runs: `base` but for the axes.

        Raises:
            ValueError: a setting that EngineConfig refuses.
        """
        for page_size in self.page_sizes:
            check_int("page_size", page_size, at_least=1)
        axes = (self.pool_tokens, self.page_sizes, self.schedule_policies, self.eviction_policies)
        return [
            dataclasses.replace(
                base,
                num_pages=pool_tokens // page_size + 1,
                page_size=page_size,
                schedule_policy=schedule_policy,
                eviction_policy=eviction_policy,
            )
            for pool_tokens, page_size, schedule_policy, eviction_policy in itertools.product(*axes)
        ]


def run_sweep(
    trace: Trace,
    configs: Sequence[EngineConfig],
    costs: CostModel,
    *,
    optimum: bool,
    on_progress: Callable[[int, int], object] | None = None,
) -> list[ReplayReport]:
    """A report for each of the settings, in their order.

    on_progress: gets the runs that are done and the requests that the present run has ended.
    """
    reports: list[ReplayReport] = []
    for config in configs:
        num_done = len(reports)

        def tell(num_ended: int, num_done: int = num_done) -> None:
            if on_progress is not None:
                on_progress(num_done, num_ended)

        simulation = simulate(trace, config, costs, tell)
        reports.append(make_report(trace, config, simulation, optimum=optimum))
    return reports
