"""The generation loop over the functional core gives what dense decoding gives, and its steps can be exported."""

import jax
import jax.export
import numpy as np
from tiny import dense_greedy, random_prompts, tiny_llama

from examples.generation_loop import PAGE_SIZE, export_step, generate, one_row
from radix_jax.functional import decode, init_kv, prefill
from radix_jax.models.registry import params_of

[PROMPT] = random_prompts(1, lens=(PAGE_SIZE, 2 * PAGE_SIZE), seed=5)


def test_it_generates_what_the_dense_model_gives() -> None:
    num_tokens = 2 * PAGE_SIZE
    assert generate(params_of(tiny_llama()), PROMPT, num_tokens) == dense_greedy(PROMPT, num_tokens)


def exported_pair() -> tuple[list[jax.export.Exported], list[list[jax.Array]]]:
    """Both steps of the loop as programs, and the flat arguments of each."""
    params, prompt = params_of(tiny_llama()), PROMPT
    pages = np.arange(1, 5, dtype=np.int32)
    kv = init_kv(params.config, 5, PAGE_SIZE)
    prefilled, _ = jax.jit(prefill)(params, kv, one_row(prompt, 0, pages))
    token = np.array(dense_greedy(prompt, 1), np.int32)
    arguments = [
        (params, kv, one_row(prompt, 0, pages)),
        (params, prefilled, one_row(token, len(prompt), pages)),
    ]
    programs = [export_step(step, *args) for step, args in zip((prefill, decode), arguments, strict=True)]
    return programs, [jax.tree.leaves(args) for args in arguments]


def test_exported_steps_give_the_same_tokens() -> None:
    programs, leaves = exported_pair()
    logits = [program.call(*flat)[1] for program, flat in zip(programs, leaves, strict=True)]
    assert [int(row[0].argmax()) for row in logits] == dense_greedy(PROMPT, 2)


def test_exported_steps_survive_as_bytes() -> None:
    programs, leaves = exported_pair()
    loaded = [jax.export.deserialize(program.serialize()) for program in programs]
    logits = [program.call(*flat)[1] for program, flat in zip(loaded, leaves, strict=True)]
    assert [int(row[0].argmax()) for row in logits] == dense_greedy(PROMPT, 2)
