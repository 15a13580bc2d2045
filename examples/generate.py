"""Continue a few prompts, of different lengths and with settings of their own.

python examples/generate.py [MODEL]
"""

from tiny_model import open_llm

from radix_jax import SamplingParams

PROMPTS = ["The capital of France is", "One, two, three,", "Water is"]
EACH = [
    SamplingParams(temperature=0, max_tokens=8),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=12),
    SamplingParams(n=2, seed=2, max_tokens=8),  # two samples; the prompt is computed once
]


def main() -> None:
    """One call serves all three."""
    with open_llm() as llm:
        for output in llm.generate(PROMPTS, EACH):
            for completion in output.outputs:
                num_tokens = len(completion.token_ids)
                print(f"{output.prompt!r} -> {completion.text!r} ({num_tokens} tokens, {completion.finish_reason})")


if __name__ == "__main__":
    main()
