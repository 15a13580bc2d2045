"""A cache saved and loaded: the same KV, hits and tokens; files of others and damaged ones are refused."""

import dataclasses
import enum
import logging
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from tiny import (
    SMALL,
    TINY,
    dense_greedy,
    finish,
    generate,
    greedy,
    random_prompts,
    share_programs,
    tiny_llama,
    token_ids,
)
from tiny_llm import new_llm

from radix_jax import Engine, EngineConfig
from radix_jax.cache import of_weights
from radix_jax.cache_file import weights_fingerprint
from radix_jax.models.registry import params_of
from radix_jax.runner import runner as runner_module

PROMPTS = random_prompts(5, lens=(20, 60), num_stems=2, seed=110)
NAMESPACES: list[Hashable] = [None, "a", ("b", 1, None), 1, True]
Contents = dict[tuple[Hashable, tuple[int, ...]], bytes]


class Color(enum.IntEnum):
    RED = 1


def new_engine(**fields: Any) -> Engine:
    return share_programs(Engine(tiny_llama(), None, EngineConfig(**(SMALL | {"num_pages": 200} | fields))))


def bare_engine(**fields: Any) -> Engine:
    """One that runs no steps, and so compiles none."""
    return Engine(tiny_llama(), None, EngineConfig(**(SMALL | {"num_pages": 40} | fields)))


def fill(engine: Engine, prompts: list[Any], namespace: Hashable = None, seed: int = 0) -> None:
    """Cache prompts without computing them: their KV is random bits."""
    rng, cache = np.random.default_rng(seed), engine.cache
    _, page_size, width = engine.runner.kv.shape
    for prompt in prompts:
        num_pages = len(prompt) // page_size
        pages = cache.allocate(num_pages)
        shape = num_pages, TINY.num_layers, page_size, width * engine.runner.kv.dtype.itemsize
        values = rng.integers(0, 256, shape, np.uint8).view(engine.runner.kv.dtype)
        for some in np.array_split(np.arange(num_pages), -(-num_pages // engine.runner.num_carried_pages)):
            engine.runner.write_pages(pages[some], values[some])
        result = cache.tree.insert_prefix(prompt, pages, namespace)
        cache.free(pages[: result.cached_len // page_size])


def contents(engine: Engine) -> Contents:
    """The KV of each cached page, by namespace (with its type) and all tokens up to its end."""
    page_size, found = engine.config.page_size, {}
    before: dict[int | None, tuple[int, ...]] = {}
    for node in engine.cache.tree.snapshot().nodes:
        ids = before[node.node_id] = before.get(node.parent_id, ()) + tuple(node.token_ids.tolist())
        start = len(ids) - len(node.token_ids)
        for place, page in enumerate(node.page_ids):
            kv = engine.runner.read_pages(np.array([page], np.int32))
            found[repr(node.namespace), ids[: start + (place + 1) * page_size]] = kv.tobytes()
    return found


def hits(engine: Engine, namespace: Hashable) -> list[int]:
    outputs = []
    for prompt in PROMPTS:
        request_id = engine.add_request(prompt, greedy(3), namespace=namespace, cache="read")
        outputs.append(finish(engine)[request_id])
    assert token_ids(outputs) == [dense_greedy(prompt, 3) for prompt in PROMPTS]
    return [output.cached_tokens for output in outputs]


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    there, path = new_engine(), tmp_path / "cache"
    for namespace in NAMESPACES:
        for prompt in PROMPTS[::2]:
            there.add_request(prompt, greedy(4), namespace=namespace)
    finish(there)
    num_tokens = there.cache.tree.total_size
    assert there.save_cache(path) == num_tokens
    here = new_engine()
    assert here.load_cache(str(path)) == num_tokens
    assert contents(here) == contents(there)
    # Tails are not saved.
    there.cache._pool.free(there.cache._tails.reset())
    for namespace in NAMESPACES:
        assert hits(here, namespace) == hits(there, namespace)
    assert max(hits(here, None)) > 0
    here.check_integrity()
    assert here.load_cache(path) == 0, "it has all of it"


def test_the_file_is_one_of_safetensors(tmp_path: Path) -> None:
    engine = bare_engine()
    fill(engine, PROMPTS)
    engine.save_cache(tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="numpy") as file:
        assert file.metadata()["format"] == "radix_jax cache"
        assert file.metadata()["page_size"] == "4"
        kv = file.get_tensor("kv")
    assert kv.shape == (engine.cache.tree.total_size // 4, 2, 4, 64)
    assert kv.dtype == np.float32


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_bit_of_every_dtype(
    page_size: int, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "CARRIED_BYTES", 3 * page_size * 2 * 64 * 4)  # several calls
    fields = {"page_size": page_size, "kv_dtype": kv_dtype, "num_pages": 400 // page_size}
    there, here = bare_engine(**fields), bare_engine(**fields)
    for seed in range(2):
        fill(there, PROMPTS[seed::2], seed=seed)
        num_before = here.cache.tree.total_size
        num_saved = there.save_cache(tmp_path / "cache")
        assert here.load_cache(tmp_path / "cache") == num_saved - num_before > 0
    assert contents(here) == contents(there)
    for engine, kinds in ((there, {"read": 1, "write": 1}), (here, {"read": 1, "write": 1})):
        compiled = [record.bucket.kind for record in engine.ledger.records]
        assert {kind: compiled.count(kind) for kind in compiled} == kinds


def test_namespaces_that_json_has_no_form_for_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, here = bare_engine(num_pages=300), bare_engine(num_pages=300)
    saved: list[Hashable] = [None, True, 1, 1.0, "1", (), ("a", (2, None)), -0.5]
    skipped: list[Hashable] = [Color.RED, b"1", frozenset([1]), object(), float("nan"), 1j]
    for place, namespace in enumerate(saved + skipped):
        fill(there, PROMPTS[:1], namespace, seed=place)
    num_each = len(PROMPTS[0]) // 4 * 4
    with caplog.at_level(logging.WARNING, "radix_jax"):
        assert there.save_cache(tmp_path / "cache") == len(saved) * num_each
    assert f"{len(skipped) * num_each} cached tokens are not saved" in caplog.text
    assert here.load_cache(tmp_path / "cache") == len(saved) * num_each
    assert contents(here) == {key: kv for key, kv in contents(there).items() if key[0] in map(repr, saved)}


def test_a_smaller_pool_takes_what_was_used_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, here = bare_engine(), bare_engine(num_pages=8)
    prompts = [range(8), range(100, 116), range(200, 212)]
    fill(there, prompts)
    assert there.save_cache(tmp_path / "cache") == 36
    here.cache.allocate(1)
    with caplog.at_level(logging.WARNING, "radix_jax"):
        assert here.load_cache(tmp_path / "cache") == 24
    assert "12 of 36 cached tokens" in caplog.text
    assert [here.cache.match_len(prompt) for prompt in prompts] == [0, 12, 12]
    expected = contents(there)
    assert all(expected[key] == kv for key, kv in contents(here).items())


def test_what_is_cached_stays(tmp_path: Path) -> None:
    there, here = bare_engine(), bare_engine()
    fill(there, [range(8), range(100, 116)], seed=1)
    there.save_cache(tmp_path / "cache")
    fill(here, [range(100, 108), range(300, 308)], seed=2)
    before = contents(here)
    assert here.load_cache(tmp_path / "cache") == 16
    after = contents(here)
    assert {key: after[key] for key in before} == before
    assert len(after) == len(before) + 4
    here.check_integrity()


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 8}, "page_size is 4 in the file and 8 here"),
    ({"kv_dtype": "float16"}, "kv_dtype is float32 in the file and float16 here"),
    ({"deterministic": True}, "deterministic=False"),
    ({"enable_prefix_cache": False}, "enable_prefix_cache=False"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS)
def test_other_settings_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    there, here = bare_engine(), bare_engine(**fields)
    fill(there, PROMPTS[:1])
    there.save_cache(tmp_path / "cache")
    with pytest.raises(ValueError, match=message):
        here.load_cache(tmp_path / "cache")
    assert here.cache.tree.total_size == 0
    here.check_integrity()


def test_another_model_is_refused(tmp_path: Path) -> None:
    there, path, config = bare_engine(), tmp_path / "cache", EngineConfig(**(SMALL | {"num_pages": 40}))
    fill(there, PROMPTS[:1])
    there.save_cache(path)
    weights = weights_fingerprint(there.params)
    other = Engine(tiny_llama(seed=1), None, config)
    with pytest.raises(ValueError, match=f"weights is {weights} in the file and {weights_fingerprint(other.params)}"):
        other.load_cache(path)
    other = Engine(tiny_llama(dataclasses.replace(TINY, rms_norm_eps=0.5)), None, config)
    with pytest.raises(ValueError, match=r"model is LlamaConfig\(.* in the file and LlamaConfig\(.*rms_norm_eps=0.5"):
        other.load_cache(path)


def test_the_fingerprint_is_of_names_dtypes_shapes_and_every_value() -> None:
    params = params_of(tiny_llama())
    first = weights_fingerprint(params)
    assert first == weights_fingerprint(jax.tree.map(lambda leaf: leaf.copy(), params))
    places = range(len(jax.tree.leaves(params.weights)))

    def changed(place: int, change: Callable[[Any], Any]) -> str:
        leaves, treedef = jax.tree.flatten(params.weights)
        leaves[place] = change(leaves[place])
        return weights_fingerprint(dataclasses.replace(params, weights=jax.tree.unflatten(treedef, leaves)))

    changes = (
        lambda leaf: leaf.at[(-1,) * leaf.ndim].add(1),
        lambda leaf: leaf.reshape(-1, 1),
        lambda leaf: leaf.astype("bfloat16"),
    )
    fingerprints = {changed(place, change) for place in places for change in changes}
    assert len(fingerprints | {first}) == len(changes) * len(places) + 1


def test_a_file_is_of_the_weights_of_now(tmp_path: Path) -> None:
    """Whichever version an engine counts them as."""
    engine, old, new = bare_engine(num_pages=80), tmp_path / "old", tmp_path / "new"
    fill(engine, PROMPTS[:1], "a", seed=1)
    num_old = engine.save_cache(old)
    engine.update_params(tiny_llama(seed=1))
    assert engine.cache.tree.total_size == 0
    for namespace in (None, "a"):
        fill(engine, PROMPTS[:2], of_weights(namespace, 1), seed=2)
    num_new = engine.save_cache(new)
    assert num_new == engine.cache.tree.total_size > num_old
    with pytest.raises(ValueError, match="weights is"):
        engine.load_cache(old)
    other = Engine(tiny_llama(seed=1), None, EngineConfig(**(SMALL | {"num_pages": 80})))
    assert other.load_cache(new) == num_new
    assert other.cache.match_len(PROMPTS[0], "a") == len(PROMPTS[0]) // 4 * 4
    kv = list(contents(engine).values())
    assert list(contents(other).values()) == kv
    engine.flush_cache()
    engine.update_params(tiny_llama())
    assert engine.load_cache(old) == num_old
    assert engine.cache.match_len(PROMPTS[0], of_weights("a", 2)) == num_old
    assert engine.cache.match_len(PROMPTS[0], "a") == 0
    engine.check_integrity()


def test_only_an_idle_engine_saves_and_loads(tmp_path: Path) -> None:
    engine, path = new_engine(), tmp_path / "cache"
    generate(engine, PROMPTS[:1], greedy(1))
    engine.save_cache(path)
    request_id = engine.add_request(PROMPTS[1], greedy(2))
    for call in (engine.save_cache, engine.load_cache):
        with pytest.raises(RuntimeError, match="0 running and 1 waiting requests use the cache"):
            call(path)
    assert finish(engine)[request_id].outputs[0].token_ids == dense_greedy(PROMPTS[1], 2)
    engine.sleep()
    for call in (engine.save_cache, engine.load_cache):
        with pytest.raises(RuntimeError, match="asleep"):
            call(path)
    engine = bare_engine()
    engine.close()
    for call in (engine.save_cache, engine.load_cache):
        with pytest.raises(RuntimeError, match="closed"):
            call(path)


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    there, here = bare_engine(), bare_engine()
    fill(there, PROMPTS[:2])
    there.save_cache(tmp_path / "cache")
    fill(here, [range(300, 320)], seed=3)
    before, num_free = contents(here), here.stats().num_free_pages
    whole, damaged = (tmp_path / "cache").read_bytes(), tmp_path / "damaged"
    num_refused = 0
    for place in range(0, len(whole), 97):
        damaged.write_bytes(whole[:place])
        with pytest.raises(ValueError, match="make it anew"):
            here.load_cache(damaged)
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"damaged|is not of this engine|is of format"):
            here.load_cache(damaged)
        num_refused += 1
    assert num_refused > 50
    assert (contents(here), here.stats().num_free_pages) == (before, num_free)
    here.check_integrity()
    with pytest.raises(FileNotFoundError):
        here.load_cache(tmp_path / "nowhere")
    (tmp_path / "text").write_text("radix")
    with pytest.raises(ValueError, match="no safetensors file"):
        here.load_cache(tmp_path / "text")
    assert here.load_cache(tmp_path / "cache") > 0


def test_an_interrupt_while_loading_empties_the_cache_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path = new_engine(), tmp_path / "cache"
    generate(engine, PROMPTS[:2], greedy(1))
    engine.save_cache(path)
    engine.flush_cache()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "write_pages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.load_cache(path)
    engine.check_integrity()
    assert engine.load_cache(path) > 0
    assert token_ids(generate(engine, PROMPTS[:1], greedy(3))) == [dense_greedy(PROMPTS[0], 3)]


def test_an_llm_has_it_too_and_an_empty_cache_is_one(tmp_path: Path) -> None:
    llm = new_llm(num_pages=40)
    fill(llm.engine, PROMPTS[:1])
    num_tokens = llm.save_cache(tmp_path / "cache")
    llm.flush_cache()
    assert llm.save_cache(tmp_path / "empty") == llm.load_cache(tmp_path / "empty") == 0
    assert llm.load_cache(tmp_path / "cache") == num_tokens == llm.cache.tree.total_size
