"""A made-up hour of chats on the engine's scheduler and cache, without a model: what a policy and a pool size change.

python examples/trace_replay.py
"""

import numpy as np

from radix_jax import EngineConfig
from radix_jax.replay import Trace, TraceRequest, make_report, simulate
from radix_jax.replay.trace import GivenIds

NUM_CHATS, NUM_TURNS, GAP_S = 60, 6, 60.0


def make_trace(seed: int = 0) -> Trace:
    """Chats after one of four system prompts; each turn asks with all that was said before."""
    rng = np.random.default_rng(seed)

    def tokens(num: int) -> np.ndarray:
        return rng.integers(0, 32_000, num).astype(np.int32)

    systems = [tokens(600) for _ in range(4)]
    requests = []
    for chat in range(NUM_CHATS):
        said, arrival_s = systems[chat % 4], float(rng.uniform(0, 3600))
        for _ in range(NUM_TURNS):
            prompt, answer = np.concatenate([said, tokens(80)]), tokens(120)
            ids = GivenIds(prompt), GivenIds(answer)
            requests.append(TraceRequest(arrival_s, len(prompt), len(answer), *ids))
            said, arrival_s = np.concatenate([prompt, answer]), arrival_s + float(rng.exponential(GAP_S))
    return Trace("chats", sorted(requests, key=lambda request: request.arrival_s))


def main() -> None:
    """A table of hit rates and times to the first token."""
    trace = make_trace()
    print(f"{len(trace)} requests, {trace.num_prompt_tokens:,} prompt tokens")
    print("pool (tokens)  eviction    hit rate  optimum  mean TTFT (ms)")
    for num_pages in (200, 400, 800):
        for eviction in ("lru", "fifo", "reuse-rate"):
            config = EngineConfig(num_pages=num_pages + 1, max_running_requests=16, eviction_policy=eviction)
            report = make_report(trace, config, simulate(trace, config), optimum=True)
            figures = f"{report.hit_rate:8.1%}  {report.optimal_hit_rate:7.1%}  {1000 * report.ttft.mean_s:14.1f}"
            print(f"{report.pool_tokens:13,}  {eviction:10}  {figures}")


if __name__ == "__main__":
    main()
