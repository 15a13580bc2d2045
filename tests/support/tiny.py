"""Tiny Llamas for engine tests, the dense greedy oracle over them, and engines that keep their compiles."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from radix_jax import Engine, EngineConfig, RequestOutput, SamplingParams
from radix_jax.models.llama import Llama, LlamaConfig, weight_specs

VOCAB_SIZE = 512
MAX_LEN = 128
TINY = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=MAX_LEN,
)
# One shape of step for most tests: 8 rows, and 64 tokens of prompt.
SMALL: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 1600,
    "max_model_len": MAX_LEN,
    "max_running_requests": 8,
    "max_prefill_tokens": 64,
}
# Logits of a tiny Llama spread by about 1; float32 rounding moves them by about 1e-6, whatever the shapes.
MIN_TOP2_GAP = 5e-5


def random_weights(config: LlamaConfig, seed: int = 0) -> dict[Any, Any]:
    """Weights that spread activations and logits by about 1; made on the host, which compiles nothing."""
    rng = np.random.default_rng(seed)
    weights: dict[Any, Any] = {}
    for spec in weight_specs(config):
        if spec.path == ("head",) and config.tie_word_embeddings:
            continue
        shape = spec.shape[::-1] if spec.transpose else spec.shape
        inner = weights
        for part in spec.path[:-1]:
            inner = inner.setdefault(part, {})
        is_norm = len(shape) == 1
        values = (
            rng.uniform(0.5, 1.5, shape)
            if is_norm
            else rng.normal(0, shape[-2 if spec.transpose else -1] ** -0.5, shape)
        )
        inner[spec.path[-1]] = jnp.asarray(values, jnp.float32)
    return weights


@functools.cache
def tiny_llama(config: LlamaConfig = TINY, seed: int = 0) -> Llama:
    """A Flax module with `random_weights`."""
    return module_of(config, random_weights(config, seed))


def module_of(config: LlamaConfig, weights: dict[Any, Any]) -> Llama:
    """A Flax module that holds the given weights."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, weights)
    return nnx.merge(graph, state)


def counting_llama() -> Llama:
    """A Llama whose next token is the one before plus 1, modulo its vocabulary of 64, whatever came earlier."""
    return following_llama([*range(1, 64), 0])


def following_llama(following: Sequence[int]) -> Llama:
    """A Llama that says following[i] after token i, whatever came earlier; its vocabulary is as long."""
    size = len(following)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_LEN,
    )
    weights = jax.tree.map(jnp.zeros_like, random_weights(config))
    weights |= {"embed": jnp.eye(size), "norm": jnp.ones(size), "head": jnp.eye(size)[jnp.array(following)]}
    return module_of(config, weights)


@functools.cache
def dense_logits(module: Llama) -> Callable[[jax.Array], jax.Array]:
    """Jitted: int32 [MAX_LEN] -> logits of every position, without cache, pages or chunks."""
    return jax.jit(lambda token_ids: module(token_ids))


def dense_greedy(prompt: Sequence[int] | np.ndarray, num_tokens: int, module: Llama | None = None) -> list[int]:
    """What greedy decoding gives, each token from the whole sequence anew.

    Refuses a sequence whose choice hangs on rounding: take another prompt.
    """
    logits_of = dense_logits(module or tiny_llama())
    ids = np.zeros(MAX_LEN, np.int32)
    ids[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + num_tokens):
        logits = np.asarray(logits_of(jnp.asarray(ids)))[end - 1]
        second, first = np.sort(logits)[-2:]
        assert first - second > MIN_TOP2_GAP, f"the two best tokens at place {end} are {first - second} apart"
        ids[end : end + 1] = logits.argmax()
    return ids[len(prompt) : len(prompt) + num_tokens].tolist()


def dense_drawn(
    prompt: Sequence[int] | np.ndarray, num_tokens: int, seed: int, sample_index: int = 0, module: Llama | None = None
) -> list[int]:
    """What sampling at temperature 1 gives: the argmax of logits + Gumbel noise, each token from the whole sequence.

    The noise comes from seed, sample index and position alone. Refuses what hangs on rounding.
    """
    logits_of = dense_logits(module or tiny_llama())
    ids = np.zeros(MAX_LEN, np.int32)
    ids[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + num_tokens):
        logits = np.asarray(logits_of(jnp.asarray(ids)))[end - 1]
        drawn = logits + gumbel_noise(seed, sample_index, end, len(logits))
        second, first = np.sort(drawn)[-2:]
        assert first - second > MIN_TOP2_GAP, f"the two best tokens at place {end} are {first - second} apart"
        ids[end : end + 1] = drawn.argmax()
    return ids[len(prompt) : len(prompt) + num_tokens].tolist()


def gumbel_noise(seed: int, sample_index: int, position: int, num: int) -> np.ndarray:
    """What sampling at temperature 1 adds to `num` logits."""
    key = jax.random.wrap_key_data(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return np.asarray(jax.random.gumbel(key, (num,), jnp.float32))


def random_prompts(num: int, *, lens: Sequence[int] = (1, 90), num_stems: int = 0, seed: int = 0) -> list[np.ndarray]:
    """Prompts of random ids and lengths in [lens[0], lens[1]); with stems, each begins with part of one of them."""
    rng = np.random.default_rng(seed)
    stems = rng.integers(0, VOCAB_SIZE, (max(num_stems, 1), lens[1]))
    prompts = []
    for i in range(num):
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(*lens)).astype(np.int32)
        if num_stems:
            stem_len = rng.integers(0, len(prompt) + 1)
            prompt[:stem_len] = stems[i % num_stems, :stem_len]
        prompts.append(prompt)
    return prompts


@functools.cache
def _kept_engine(module: Llama, fields: tuple[tuple[str, Any], ...]) -> Engine:
    return share_programs(Engine(module, None, EngineConfig(**dict(fields))), module)


@functools.cache
def _programs(module: Llama, attention_backend: str, shapes: tuple[Any, ...]) -> dict[Any, Any]:
    return {}


def share_programs(engine: Engine, module: Llama | None = None) -> Engine:
    """The engine, running what was compiled for others of its model and backend whose arrays on the device have the
    same shapes: a program is a bucket's, and knows nothing of the settings that the host alone reads."""
    runner = engine._runner
    shapes = runner.kv.shape, runner.kv.dtype, runner.sampler_state.tokens.shape, runner._last_tokens.shape
    runner._compiled = _programs(module or tiny_llama(), engine.config.attention_backend, shapes)
    return engine


def drop_kept_engines() -> None:
    """And with them their compiles."""
    _kept_engine.cache_clear()
    _programs.cache_clear()


def tiny_engine(module: Llama | None = None, **fields: Any) -> Engine:
    """An idle engine with an empty cache: SMALL, with `fields` changed. Engines are kept, and with them their compiles;
    so their counts go on from one test to the next."""
    key = module or tiny_llama(), tuple(sorted((SMALL | fields).items()))
    if _kept_engine(*key).has_unfinished():  # a test before failed half-way
        drop_kept_engines()
    engine = _kept_engine(*key)
    engine.flush_cache()
    return engine


def drawn(max_tokens: int, seed: int | None, **fields: Any) -> SamplingParams:
    """SamplingParams of temperature 1."""
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed, **fields)


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """SamplingParams of temperature 0."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def finish(engine: Engine, *, max_steps: int = 5000) -> dict[str, RequestOutput]:
    """Step until nothing is left, every page audited after every step; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return last
        for output in engine.step():
            assert output.request_id not in last or not last[output.request_id].finished
            last[output.request_id] = output
        engine.check_integrity()
    raise AssertionError(f"not finished after {max_steps} steps")


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int] | np.ndarray],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[RequestOutput]:
    """Run prompts together; their last outputs in order."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    request_ids = [engine.add_request(prompt, params) for prompt, params in zip(prompts, each, strict=True)]
    outputs = finish(engine)
    return [outputs[request_id] for request_id in request_ids]


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The output ids of each request."""
    return [output.outputs[0].token_ids for output in outputs]


def samples(output: RequestOutput) -> list[list[int]]:
    """The ids of each sample."""
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


def assert_idle(engine: Engine) -> None:
    """Every page is free or evictable, and nothing is locked."""
    stats = engine.stats()
    engine.check_integrity()
    assert stats.num_protected_pages == 0
    assert stats.num_running == stats.num_waiting == 0
    num_pages = engine.config.num_pages
    assert num_pages is not None
    assert stats.num_free_pages + stats.num_evictable_pages == num_pages - 1
