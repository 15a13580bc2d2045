"""Many questions after one system prompt: what the cache saved, and the tree that it is.

python examples/shared_prefix.py [MODEL]
"""

from tiny_model import open_llm

from radix_jax import SamplingParams

SYSTEM = "You are a librarian who answers in one short sentence, and says so where nobody knows. "
QUESTIONS = [
    "What is a page?",
    "What is a page number?",
    "What is an index?",
    "What is a book?",
    "Who writes books?",
]


def main() -> None:
    """Two rounds: the first computes the system prompt once, the second finds whole prompts."""
    prompts = [SYSTEM + question for question in QUESTIONS]
    with open_llm() as llm:
        for title in ("first round", "second round"):
            before = llm.stats()
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
            after = llm.stats()
            print(title)
            for question, output in zip(QUESTIONS, outputs, strict=True):
                print(f"  {output.cached_tokens:3} of {len(output.prompt_token_ids)} tokens cached: {question}")
            num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
            num_cached = after.num_cached_tokens - before.num_cached_tokens
            print(f"  hit rate {num_cached / num_prompt:.0%}")
        print(llm.cache.tree.render(llm.tokenizer.decode))


if __name__ == "__main__":
    main()
