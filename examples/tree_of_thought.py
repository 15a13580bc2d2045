"""Tree of thought: thoughts are sampled from held prefixes, valued, and the best ones thought on."""

from collections.abc import Callable, Sequence

from flax import nnx

from radix_jax import Engine, EngineConfig, SamplingParams
from radix_jax.models.llama import Llama, LlamaConfig

Value = Callable[[Sequence[int]], float]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "head_dim": 8}


def think(
    engine: Engine,
    question: Sequence[int],
    value: Value,
    *,
    depth: int,
    num_thoughts: int,
    num_kept: int,
    thought_len: int,
) -> list[int]:
    """The best chain of `depth` thoughts of `thought_len` ids: at each depth every kept chain is continued by
    `num_thoughts` samples, and of all the `num_kept` chains of the highest value are kept."""
    thought = SamplingParams(n=num_thoughts, max_tokens=thought_len, ignore_eos=True)
    kept = [engine.prefix(question)]
    for _ in range(depth):
        chains = [(handle, output.token_ids) for handle in kept for output in handle.sample(thought)]
        start = len(question)
        chains.sort(key=lambda chain: value([*chain[0].token_ids[start:].tolist(), *chain[1]]), reverse=True)
        longer = [handle.extend(ids) for handle, ids in chains[:num_kept]]
        for handle in kept:
            handle.release()
        kept = longer
    best = kept[0].token_ids[len(question) :].tolist()
    for handle in kept:
        handle.release()
    return best


def closeness(ids: Sequence[int]) -> float:
    """A toy value: how near the ids' mean is to 32, whatever a random model may think."""
    return -abs(sum(ids) / len(ids) - 32)


def main() -> None:
    """On a tiny random model, so that it is done at once."""
    model = Llama(LlamaConfig(**SIZES, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))
    engine = Engine(model, config=EngineConfig(page_size=4, num_pages=200, max_model_len=64, max_running_requests=8))
    chain = think(engine, list(range(20)), closeness, depth=3, num_thoughts=4, num_kept=2, thought_len=3)
    print(f"mean {sum(chain) / len(chain):.1f} of {chain}")
    stats = engine.stats()
    print(f"{stats.num_prefill_tokens} prompt tokens computed, {stats.num_cached_tokens} found in the cache")
    print(engine.cache.tree.render())
    engine.close()


if __name__ == "__main__":
    main()
