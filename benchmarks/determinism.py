"""What deterministic=True costs: python -m benchmarks.determinism [--rounds 3] [--json]

The offline workloads on SmolLM2-135M, through an engine of each kind in turn, everything compiled before. A ratio is
the median, over the rounds, of the seconds of the deterministic engine over those of the usual one right before it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.offline import MAX_MODEL_LEN, MODEL, POOL_TOKENS, Measurement, measure
from benchmarks.workloads import WORKLOADS
from radix_jax import LLM, Engine, EngineConfig
from radix_jax.models.base import ModelParams

PAGE_SIZE = 16


def compare(params: ModelParams, workload: str, num_rounds: int) -> dict[str, str | float]:
    """One line of the report."""
    rounds = [[_measure(params, workload, deterministic=which) for which in (False, True)] for _ in range(num_rounds)]
    usual, deterministic = rounds[-1]
    return {
        "workload": workload,
        "usual_tokens_per_s": usual.output_tokens_per_s,
        "deterministic_tokens_per_s": deterministic.output_tokens_per_s,
        "ratio": round(statistics.median(there.seconds / here.seconds for here, there in rounds), 2),
    }


def _measure(params: ModelParams, workload: str, *, deterministic: bool) -> Measurement:
    settings = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=POOL_TOKENS // PAGE_SIZE + 1,
        max_model_len=MAX_MODEL_LEN,
        deterministic=deterministic,
    )
    engine = Engine(params.config, params, settings)
    try:
        return measure(engine, workload)
    finally:
        engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.determinism", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS], help="may be repeated; all by default")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", action="store_true", help="print one JSON object a workload")
    args = parser.parse_args(argv)
    with LLM(args.model, num_pages=2) as llm:
        params = llm.engine.params
    for workload in args.workload or WORKLOADS:
        row = compare(params, workload, args.rounds)
        if args.json:
            print(json.dumps(row))
        else:
            print(
                f"{workload}: {row['usual_tokens_per_s']} tokens/s, deterministic {row['deterministic_tokens_per_s']}, "
                f"{row['ratio']} times as long"
            )


if __name__ == "__main__":
    main()
