"""Text as it comes, and two ways to end a request early: leave its stream, or abort it by its id.

python examples/streaming.py [MODEL]
"""

from tiny_model import open_llm

from radix_jax import SamplingParams
from radix_jax.text import StopText

PROMPT = "Once upon a time there was a tree"


def main() -> None:
    """A stream that runs to its end, one that is left, and a request that is aborted."""
    sampling = SamplingParams(temperature=0, max_tokens=24)
    with open_llm() as llm:
        engine, prompt_ids = llm.engine, llm.tokenizer.encode(PROMPT)

        text = StopText(llm.tokenizer)  # gives text out once no later token can change it
        num_seen = 0
        print(PROMPT, end="", flush=True)
        for output in engine.stream(prompt_ids, sampling):
            new_ids = output.outputs[0].token_ids[num_seen:]
            num_seen += len(new_ids)
            text.push(new_ids)
            print(repr(text.take())[1:-1], end="", flush=True)
        print(repr(text.finish())[1:-1])

        for output in engine.stream(prompt_ids, sampling):
            if len(output.outputs[0].token_ids) == 5:
                break
        print("left after 5 tokens; unfinished requests:", len(engine.unfinished))

        request_id = engine.add_request(prompt_ids, sampling)
        engine.step()
        aborted = engine.abort(request_id)
        assert aborted is not None
        print("aborted:", aborted.outputs[0].finish_reason)
        print("pages still locked:", engine.stats().num_protected_pages)


if __name__ == "__main__":
    main()
