"""How likely each token was, and where a text ends: a stop string, a token id, a check of one's own.

python examples/logprobs_and_stop.py [MODEL]
"""

from tiny_model import open_llm

from radix_jax import SamplingParams
from radix_jax.request import FinishAt

PROMPT = "A list of colours: red, green,"


def at_an_even_id(index: int, new_ids: list[int]) -> FinishAt | None:
    """Ends a sample at its first id that is even; a real check would look at text, a grammar or a game."""
    return next((FinishAt(place, "even id") for place, id_ in enumerate(new_ids, 1) if id_ % 2 == 0), None)


def main() -> None:
    """Log-probabilities first, then three ends."""
    with open_llm() as llm:
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, logprobs=2))[0].outputs[0]
        assert output.logprobs is not None
        for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
            listed = ", ".join(f"{entry.decoded_token!r} {entry.logprob:.2f}" for entry in entries.values())
            print(f"id {token_id:5}, rank {entries[token_id].rank}: {listed}")
        print(f"log-probability of the whole: {output.cumulative_logprob:.2f}")

        stop = llm.tokenizer.decode(output.token_ids[3:5])
        ends = {
            f"the string {stop!r}": SamplingParams(temperature=0, max_tokens=8, stop=stop),
            f"the id {output.token_ids[2]}": SamplingParams(
                temperature=0, max_tokens=8, stop_token_ids=output.token_ids[2:3]
            ),
        }
        for what, sampling in ends.items():
            stopped = llm.generate(PROMPT, sampling)[0].outputs[0]
            print(f"{what}: {len(stopped.token_ids)} tokens, {stopped.finish_reason}, {stopped.stop_reason!r}")

        request = llm.tokenizer.encode(PROMPT), SamplingParams(temperature=0, max_tokens=64)
        *_, last = llm.engine.stream(*request, finish_check=at_an_even_id)
        print(f"a check: {len(last.outputs[0].token_ids)} tokens, {last.outputs[0].stop_reason!r}")


if __name__ == "__main__":
    main()
