"""Best of n: several continuations of one held prefix, and the one that a value likes best."""

from collections.abc import Callable, Sequence

from flax import nnx

from radix_jax import Engine, EngineConfig, SamplingParams
from radix_jax.models.llama import Llama, LlamaConfig

Value = Callable[[Sequence[int]], float]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "head_dim": 8}


def best_of_n(
    engine: Engine, prompt: Sequence[int], value: Value, *, n: int, num_tokens: int, seed: int = 0
) -> list[int]:
    """The continuation of `num_tokens` tokens, of `n` sampled ones, whose value is highest; of equal ones the first.

    All n run in one batch; the prompt is computed once.
    """
    with engine.prefix(prompt) as handle:
        outputs = handle.sample(SamplingParams(n=n, max_tokens=num_tokens, seed=seed, ignore_eos=True))
    return max((output.token_ids for output in outputs), key=value)


def largeness(ids: Sequence[int]) -> float:
    """A toy value: the mean of the ids."""
    return sum(ids) / len(ids)


def main() -> None:
    """On a tiny random model, so that it is done at once."""
    model = Llama(LlamaConfig(**SIZES, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))
    engine = Engine(model, config=EngineConfig(page_size=4, num_pages=200, max_model_len=64, max_running_requests=8))
    prompt = list(range(20))
    for n in (1, 8):
        best = best_of_n(engine, prompt, largeness, n=n, num_tokens=8)
        print(f"best of {n}: mean {largeness(best):.1f} of {best}")
    print(f"{engine.stats().num_prefill_tokens} prompt tokens computed for 9 samples of {len(prompt)} tokens")
    engine.close()


if __name__ == "__main__":
    main()
