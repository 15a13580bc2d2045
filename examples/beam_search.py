"""Beam search over held prefixes: each beam is a handle, and what beams have in common is computed once."""

import heapq
from collections.abc import Sequence

from flax import nnx

from radix_jax import Engine, EngineConfig, SamplingParams
from radix_jax.models.llama import Llama, LlamaConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "head_dim": 8}


def beam_search(engine: Engine, prompt: Sequence[int], *, width: int, num_tokens: int) -> list[tuple[list[int], float]]:
    """The `width` best continuations of `num_tokens` tokens that beams of that width find, best first: (ids, sum of
    their log-probabilities). No id ends a beam early. width: at most 20, so many log-probabilities a request gives.
    """
    next_ids = SamplingParams(temperature=0, max_tokens=1, logprobs=width, ignore_eos=True)
    beams = [(engine.prefix(prompt), 0.0)]
    for _ in range(num_tokens):
        grown = []
        for handle, score in beams:
            [output] = handle.sample(next_ids)  # the greedy token, which is the best of `logprobs` too
            assert output.logprobs is not None
            grown += [(score + each.logprob, token_id, handle) for token_id, each in output.logprobs[0].items()]
        best = heapq.nlargest(width, grown, key=lambda beam: beam[0])
        longer = [(handle.extend([token_id]), score) for score, token_id, handle in best]
        for handle, _ in beams:
            handle.release()
        beams = longer
    found = [(handle.token_ids[len(prompt) :].tolist(), score) for handle, score in beams]
    for handle, _ in beams:
        handle.release()
    return found


def main() -> None:
    """On a tiny random model, so that it is done at once."""
    model = Llama(LlamaConfig(**SIZES, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0))
    engine = Engine(model, config=EngineConfig(page_size=4, num_pages=200, max_model_len=64, max_running_requests=8))
    prompt = list(range(20))
    for width in (1, 4):
        for ids, score in beam_search(engine, prompt, width=width, num_tokens=6):
            print(f"width {width}: log-probability {score:.3f} of {ids}")
    print(f"{engine.stats().num_prefill_tokens} tokens computed, {engine.stats().num_cached_tokens} found in the cache")
    engine.close()


if __name__ == "__main__":
    main()
