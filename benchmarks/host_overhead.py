"""What a decode step costs on the host: planning, packing, sending the arrays to the device, and taking tokens over.

The scheduler, cache and packing are the engine's own; no model runs, tokens are made up. With --model a real engine
decodes as many rows besides, and the host's work is also given as a share of its step.

    python -m benchmarks.host_overhead
    python -m benchmarks.host_overhead --model smollm2-135m-instruct --json

Times are processor time of the thread that does the work, so that other programs disturb them little.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int32

from radix_jax import LLM, SamplingParams
from radix_jax.cache import PagePool, PrefixCache, RadixTree
from radix_jax.config import SchedulerLimits
from radix_jax.plan import StepPlan
from radix_jax.request import Request
from radix_jax.runner.pack import Packer, pack_copies
from radix_jax.scheduler import Buckets, Scheduler
from radix_jax.sharding import make_mesh, named_sharding

MAX_MODEL_LEN = 4096
PROMPT_LEN = 512
MAX_STAGGER = 16  # prompts differ by less, so that rows come to the end of a page at different steps
VOCAB_SIZE = 50_000
LEAVES_A_GROUP = 1000
NUM_SLOTS = 1 << 30  # of a pool with all its layers; only where padding points to depends on it
US = 1e6  # microseconds a second


@dataclass(frozen=True)
class Case:
    """What is measured.

    num_rows: requests that decode. num_spare_pages: pages of the pool besides those that the rows take and the tree
    holds in front; 0: each new page is evicted from the tree. num_nodes: nodes of the tree besides those of the rows.
    sampled: rows draw their tokens, else they are greedy. overlap: a step is planned before the one before is
    committed. num_waiting: requests that wait meanwhile, since all rows are taken.
    """

    num_rows: int = 64
    page_size: int = 16
    num_spare_pages: int = 1_000
    num_nodes: int = 100
    sampled: bool = False
    overlap: bool = True
    num_waiting: int = 0


@dataclass(frozen=True)
class Measurement:
    """Medians over the steps of a case, in microseconds.

    pack_us: of the buffer with inputs and sampling values. put_us: of the call that sends it. python_us: of
    plan, pack and commit together, the median of their sums. num_steps: decode steps measured. num_pages: of the pool.
    """

    case: Case
    plan_us: float
    pack_us: float
    put_us: float
    commit_us: float
    python_us: float
    num_steps: int
    num_pages: int


@dataclass(frozen=True)
class ModelStep:
    """A real engine's decode step. share: of it the Python that the first case measures."""

    model: str
    num_rows: int
    step_us: float
    python_us: float
    share: float


@dataclass(frozen=True)
class Report:
    """Everything that is printed."""

    machine: str
    versions: dict[str, str]
    measurements: list[Measurement]
    model_step: ModelStep | None


def cases() -> list[Case]:
    """All pools and trees, then what else differs, one thing at a time."""
    base = Case()
    grid = [
        replace(base, page_size=page_size, num_spare_pages=num_spare_pages, num_nodes=num_nodes)
        for page_size in (16, 1)
        for num_spare_pages in (1_000, 100_000)
        for num_nodes in (100, 100_000)
    ]
    return [
        *grid,
        replace(base, num_spare_pages=0, num_nodes=100_000),
        *(replace(base, num_rows=num_rows) for num_rows in (1, 8, 32)),
        replace(base, overlap=False),
        replace(base, sampled=True),
        replace(base, sampled=True, overlap=False),
        replace(base, num_waiting=1000),
    ]


def measure(case: Case, num_steps: int) -> Measurement:
    """Let all rows of a case in, then time so many decode steps.

    Raises:
        ValueError: the rows would not fit the context for so long.
    """
    scheduler, num_pages = _scheduler_with_rows(case, num_steps)
    times = _time_steps(scheduler, case, num_steps)
    plan_us, pack_us, put_us, commit_us = (statistics.median(column) * US for column in zip(*times, strict=True))
    python_us = statistics.median(plan + pack + commit for plan, pack, _, commit in times) * US
    return Measurement(case, plan_us, pack_us, put_us, commit_us, python_us, num_steps, num_pages)


def _scheduler_with_rows(case: Case, num_steps: int) -> tuple[Scheduler, int]:
    """A scheduler whose requests have all got their first token, and the pages of its pool."""
    max_tokens = num_steps + 8
    request_len = PROMPT_LEN + max_tokens
    if request_len > MAX_MODEL_LEN:
        raise ValueError(f"{num_steps} steps after {PROMPT_LEN} tokens exceed {MAX_MODEL_LEN}; measure fewer")
    num_row_pages = -(-request_len // case.page_size) * case.num_rows
    if case.num_spare_pages == 0:
        num_row_pages = -(-PROMPT_LEN // case.page_size) * case.num_rows
    num_pages = 1 + num_row_pages + case.num_nodes + case.num_spare_pages
    tree = RadixTree(page_size=case.page_size)
    cache = PrefixCache(tree, PagePool(num_pages))
    fill(cache, case.num_nodes)
    scheduler = Scheduler(
        cache,
        Buckets(
            page_size=case.page_size,
            max_model_len=MAX_MODEL_LEN,
            max_running_requests=case.num_rows,
            max_prefill_tokens=2048,
        ),
        SchedulerLimits(max_running_requests=case.num_rows, max_prefill_tokens=2048),
        max_model_len=MAX_MODEL_LEN,
    )
    rng = np.random.default_rng(0)
    for arrival in range(case.num_rows + case.num_waiting):
        scheduler.add(_request(rng, arrival, max_tokens, case.sampled))
    while True:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, _tokens(rng, plan))
        if plan.kind == "decode" and len(plan.rows) == case.num_rows:
            return scheduler, num_pages


def fill(cache: PrefixCache, num_nodes: int) -> None:
    """Cache so many nodes of one page each, a thousand below each one that hangs on the root; nobody locks them."""
    page_size = cache.page_size
    num_left, group = num_nodes, 0
    while num_left:
        parent = np.empty(0, np.int32)
        for child in range(min(num_left, LEAVES_A_GROUP + 1)):
            page = cache.allocate(1)
            ids = np.full((1 + bool(child)) * page_size, VOCAB_SIZE + group, np.int32)
            ids[-page_size:] += child * 1000
            cache.tree.insert_prefix(ids, np.concatenate([parent, page]))
            if not child:
                parent = page
            num_left -= 1
        group += 1


def _request(rng: np.random.Generator, arrival: int, max_tokens: int, sampled: bool) -> Request:
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, ignore_eos=True)
    return Request(
        request_id=str(arrival),
        token_ids=rng.integers(VOCAB_SIZE, size=PROMPT_LEN - arrival % MAX_STAGGER, dtype=np.int32),
        sampling=drawn if sampled else greedy,
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        seed=arrival,
        arrival=arrival,
    )


def _tokens(rng: np.random.Generator, plan: StepPlan) -> Int32[np.ndarray, " B"]:
    return rng.integers(VOCAB_SIZE, size=len(plan.rows), dtype=np.int32)


def _time_steps(scheduler: Scheduler, case: Case, num_steps: int) -> list[tuple[float, float, float, float]]:
    """Seconds of plan, pack, put and commit of each step. Garbage waits meanwhile."""
    rng, sharding = np.random.default_rng(1), named_sharding(make_mesh())
    packer = Packer(page_size=case.page_size, num_slots=NUM_SLOTS)
    clock = time.thread_time
    times: list[tuple[float, float, float, float]] = []
    in_flight = scheduler.plan() if case.overlap else None
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_steps):
            began = clock()
            plan = scheduler.plan()
            planned = clock()
            assert plan is not None
            if plan.copies:
                pack_copies(plan, scheduler.cache.pool.num_pages)
            packed = packer.pack(plan)
            has_tokens = plan.samples
            filled = clock()
            jax.device_put(packed.buffer, sharding)
            sent = clock()
            assert has_tokens
            in_flight, committed = (plan, in_flight) if case.overlap else (None, plan)
            assert committed is not None
            tokens = _tokens(rng, committed)
            received = clock()
            scheduler.commit(committed, tokens)
            times.append((planned - began, filled - planned, sent - filled, clock() - received))
            assert plan.kind == "decode"
            assert len(plan.rows) == case.num_rows
    finally:
        gc.enable()
    return times


def measure_model(model: str, measured: Measurement, num_steps: int) -> ModelStep:
    """Decode as many rows with a real model; the median of its steps by the wall clock."""
    case = measured.case
    rng = np.random.default_rng(2)
    with LLM(model, page_size=case.page_size, max_running_requests=case.num_rows, overlap=case.overlap) as llm:
        engine = llm.engine
        sampling = SamplingParams(temperature=0.0, max_tokens=num_steps + 8, ignore_eos=True)
        for _ in range(case.num_rows):
            engine.add_request(rng.integers(1000, size=PROMPT_LEN, dtype=np.int32), sampling)
        while engine.stats().num_decode_steps < 3:
            engine.step()
        seconds_s = []
        for _ in range(num_steps):
            began = time.perf_counter()
            engine.step()
            seconds_s.append(time.perf_counter() - began)
    step_us = statistics.median(seconds_s) * US
    return ModelStep(model, case.num_rows, step_us, measured.python_us, measured.python_us / step_us)


def run(measured_cases: Sequence[Case], num_steps: int, model: str | None = None) -> Report:
    """Measure all cases, and the first one's share of a real step if a model is named."""
    measurements = [measure(case, num_steps) for case in measured_cases]
    return Report(
        machine=_machine(),
        versions={"python": platform.python_version(), "numpy": np.__version__, "jax": jax.__version__},
        measurements=measurements,
        model_step=None if model is None else measure_model(model, measurements[0], min(num_steps, 20)),
    )


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{cpu}, {os.cpu_count()} processors, {jax.devices()[0].device_kind}"


def as_table(report: Report) -> str:
    """The report in Markdown."""
    lines = [
        "| rows | page size | pages of the pool | other nodes | rows are | overlap | waiting "
        "| plan | pack | put | commit | plan + pack + commit, µs |",
        "|---" * 12 + "|",
    ]
    for each in report.measurements:
        case = each.case
        evicting = " (none free)" if case.num_spare_pages == 0 else ""
        lines.append(
            f"| {case.num_rows} | {case.page_size} | {each.num_pages:,}{evicting} | {case.num_nodes:,} "
            f"| {'sampled' if case.sampled else 'greedy'} | {'on' if case.overlap else 'off'} | {case.num_waiting:,} "
            f"| {each.plan_us:.0f} | {each.pack_us:.0f} | {each.put_us:.0f} | {each.commit_us:.0f} "
            f"| {each.python_us:.0f} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines += ["", f"{report.machine}, {versions}. Medians of {report.measurements[0].num_steps} decode steps."]
    if report.model_step is not None:
        step = report.model_step
        lines.append(
            f"A decode step of {step.num_rows} rows of {step.model} takes {step.step_us:,.0f} µs; "
            f"plan + pack + commit are {step.share:.2%} of it."
        )
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_overhead", description="What a decode step costs on the host."
    )
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each case (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="also decode with this model; name, hub id, folder or .gguf")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    report = run(cases(), options.steps, options.model)
    print(json.dumps(asdict(report)) if options.json else as_table(report))


if __name__ == "__main__":
    main()
