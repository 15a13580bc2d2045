"""A cache in a file: the prefixes of a tree and the KV of their pages, for another engine over the same model.

One safetensors file. Metadata: what an engine must have in common with the one that saved. Tensors: the arrays of an
ExportedTree, `namespaces` as JSON, and

    kv           [pages, layers, page_size, lanes], in the pool's dtype
    page_crcs    CRC-32 of each page of it
"""

import dataclasses
import hashlib
import json
import logging
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from radix_jax.cache import PrefixCache
from radix_jax.cache.exported import ExportedTree, TreeImport, export_tree
from radix_jax.cache.keys import namespace_key, of_weights, weights_of
from radix_jax.config import EngineConfig
from radix_jax.models.base import ModelParams
from radix_jax.request import namespace_of_json
from radix_jax.runner import Runner
from radix_jax.tensor_file import TensorFile, TensorToWrite, write_tensor_file

_LOG = logging.getLogger("radix_jax")
_FORMAT, _VERSION = "radix_jax cache", "1"
_TREE = ("namespace_ids", "parents", "page_counts", "last_uses", "token_ids")


def weights_fingerprint(params: ModelParams) -> str:
    """SHA-256 over the name, dtype, shape and bytes of every leaf, fetched one by one; in hexadecimal."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path((params.weights, params.head)):
        values = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {values.dtype.name} {values.shape}\n".encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class CacheFiles:
    """Saves what an engine has cached, and loads it. Only while no request runs: pages are read and written as they
    are.

    config: with all that was left open filled in.
    """

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner
        self._hashed: tuple[ModelParams, str] | None = None

    def save(self, cache: PrefixCache, path: Path) -> int:
        """Write all prefixes of the weights of now, in namespaces that JSON can hold; returns their tokens. The others
        are counted in the log. Partial pages, pins and counts of hits are not saved.

        Raises:
            OSError: the file can't be written; what was there before still is.
        """
        tree, page_ids = self._export(cache)
        num_tokens = tree.token_ids.size
        if num_tokens < cache.tree.total_size:
            num_skipped = cache.tree.total_size - num_tokens
            _LOG.warning("%d cached tokens are not saved: JSON has no form for their namespaces", num_skipped)
        arrays = _as_arrays(tree)
        crcs: list[int] = []
        tensors = {name: TensorToWrite(array.dtype.name, array.shape, [array]) for name, array in arrays.items()}
        kv_shape, dtype = (len(page_ids), *self._page_shape), self._runner.kv.dtype.name
        tensors["kv"] = TensorToWrite(dtype, kv_shape, self._pieces(page_ids, crcs))
        tensors["page_crcs"] = TensorToWrite("uint32", (len(page_ids),), _when_asked(crcs))
        facts = {"format": _FORMAT, "version": _VERSION, "deterministic": str(self._config.deterministic)}
        facts |= self._facts() | {"weights": self._fingerprint()}
        write_tensor_file(path, facts | {"crc": str(_crc(facts, arrays))}, tensors)
        _LOG.info("%d cached tokens saved to %s", num_tokens, path)
        return num_tokens

    def load(self, cache: PrefixCache, path: Path) -> int:
        """Take in what the file has and the cache has not; returns the tokens that are new. What is cached stays; what
        there are no free pages for is left, the least recently used first, and counted in the log.

        Raises:
            OSError: the file can't be read. ValueError: it is of another model, other settings or another version, or
                damaged, or the engine has no prefix cache. Nothing is changed then.
        """
        if not self._config.enable_prefix_cache:
            raise ValueError("enable_prefix_cache=False: nothing that is loaded would serve anybody; leave it out")
        with TensorFile(path) as file:
            self._check(file, path)
            tree = _read_tree(file, path)
            kv = file.tensors.get("kv")
            if kv is None or (kv.dtype, kv.shape) != (self._runner.kv.dtype, (len(tree.token_ids), *self._page_shape)):
                raise _damaged(path, "its KV is not that of its pages")
            taking = TreeImport(cache, self._of_now(tree))
            pages = cache.allocate(len(taking.pages))
            try:
                self._fill(file, path, taking.pages, pages)
            except BaseException:
                cache.free(pages)
                raise
        taking.insert(pages)
        page_size = cache.page_size
        if taking.num_left:
            _LOG.warning(
                "%d of %d cached tokens of %s are left: no more pages are free; raise num_pages for all of them",
                taking.num_left * page_size,
                tree.token_ids.size,
                path,
            )
        _LOG.info("%d cached tokens loaded from %s", len(pages) * page_size, path)
        return len(pages) * page_size

    def _export(self, cache: PrefixCache) -> tuple[ExportedTree, Int32[np.ndarray, " P"]]:
        """What of a cache is saved, in the namespaces of callers; and its page ids."""

        def keeps(namespace: Hashable) -> bool:
            given, version = weights_of(namespace)
            return version == self._runner.weight_version and _is_json(given)

        tree, page_ids = export_tree(cache.tree.snapshot(), keeps)
        given = tuple(weights_of(namespace)[0] for namespace in tree.namespaces)
        return dataclasses.replace(tree, namespaces=given), page_ids

    def _of_now(self, tree: ExportedTree) -> ExportedTree:
        """A tree of callers' namespaces in those of the weights of now."""
        version = self._runner.weight_version
        return dataclasses.replace(
            tree, namespaces=tuple(of_weights(namespace, version) for namespace in tree.namespaces)
        )

    @property
    def _page_shape(self) -> tuple[int, int, int]:
        """Layers, tokens and lanes of a page."""
        _, page_size, width = self._runner.kv.shape
        return self._runner.params.config.num_layers, page_size, width

    def _facts(self) -> dict[str, str]:
        """What an engine must have in common with the one that saved, besides the weights."""
        num_layers, page_size, width = self._page_shape
        return {
            "model": repr(self._runner.params.config),
            "num_layers": str(num_layers),
            "page_size": str(page_size),
            "kv_dtype": self._runner.kv.dtype.name,
            "kv_width": str(width),
        }

    def _fingerprint(self) -> str:
        """Of the weights, once for each."""
        params = self._runner.params
        if self._hashed is None or self._hashed[0] is not params:
            self._hashed = params, weights_fingerprint(params)
        return self._hashed[1]

    def _check(self, file: TensorFile, path: Path) -> None:
        there = file.metadata
        kind = there.get("format"), there.get("version")
        if kind != (_FORMAT, _VERSION):
            raise ValueError(
                f"{path} is of format {kind[0]!r}, version {kind[1]!r}; this is {_FORMAT!r}, version {_VERSION!r}: "
                "give a file that save_cache of this release wrote"
            )
        self._compare(path, there, self._facts())
        self._compare(path, there, {"weights": self._fingerprint()})
        if self._config.deterministic and there.get("deterministic") != "True":
            raise ValueError(
                f"{path} was saved with deterministic=False and this engine is deterministic: its KV is rounded as the "
                "steps happened to come; save one with deterministic=True"
            )

    def _compare(self, path: Path, there: dict[str, str], here: dict[str, str]) -> None:
        differing = [
            f"{name} is {there.get(name)} in the file and {value} here"
            for name, value in here.items()
            if there.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"{path} is not of this engine: {'; '.join(differing)}. Load it with the model and the settings it was "
                "saved with, or save a new one"
            )

    def _pieces(self, page_ids: Int32[np.ndarray, " P"], crcs: list[int]) -> Iterator[np.ndarray]:
        """The KV of the pages, and the checksum of each into `crcs`."""
        num_carried = self._runner.num_carried_pages
        for start in range(0, len(page_ids), num_carried):
            values = self._runner.read_pages(page_ids[start : start + num_carried])
            crcs.extend(zlib.crc32(page.tobytes()) for page in values)
            yield values

    def _fill(self, file: TensorFile, path: Path, rows: np.ndarray, pages: Int32[np.ndarray, " P"]) -> None:
        """Put the KV of the file's pages `rows` into `pages` of the pool, each checked first."""
        crcs, num_carried = file.read("page_crcs"), self._runner.num_carried_pages
        for start in range(0, len(rows), num_carried):
            some = rows[start : start + num_carried]
            values = np.concatenate([file.read("kv", row, row + 1) for row in some.tolist()])
            if any(zlib.crc32(page.tobytes()) != crc for page, crc in zip(values, crcs[some], strict=True)):
                raise _damaged(path, "the checksum of a page differs")
            self._runner.write_pages(pages[start : start + num_carried], values)


def _as_arrays(tree: ExportedTree) -> dict[str, np.ndarray]:
    namespaces = np.frombuffer(json.dumps(tree.namespaces).encode(), np.uint8)
    return {"namespaces": namespaces} | {name: getattr(tree, name) for name in _TREE}


def _read_tree(file: TensorFile, path: Path) -> ExportedTree:
    """Raises ValueError where it is damaged."""
    arrays = {name: file.read(name) for name in ("namespaces", *_TREE)}
    facts = {name: fact for name, fact in file.metadata.items() if name != "crc"}
    if str(_crc(facts, arrays)) != file.metadata.get("crc"):
        raise _damaged(path, "the checksum of its prefixes differs")
    try:
        namespaces: list[Any] = json.loads(arrays.pop("namespaces").tobytes())
        tree = ExportedTree(tuple(map(namespace_of_json, namespaces)), **arrays)
        tree.check()
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return tree


def _when_asked(values: list[int]) -> Iterator[np.ndarray]:
    """The values as they are once the first of this is asked for."""
    yield np.array(values, np.uint32)


def _crc(facts: dict[str, str], arrays: dict[str, np.ndarray]) -> int:
    """Over the facts, and types, shapes and values of the arrays."""
    parts = [json.dumps(facts, sort_keys=True).encode()]
    parts += [f"{name} {array.dtype} {array.shape}".encode() + array.tobytes() for name, array in arrays.items()]
    return zlib.crc32(b"".join(parts))


def _is_json(namespace: Hashable) -> bool:
    """Whether a namespace comes back from JSON as it was, to its types."""
    try:
        back = namespace_of_json(json.loads(json.dumps(namespace, allow_nan=False)))
    except (TypeError, ValueError):
        return False
    return namespace_key(back) == namespace_key(namespace)


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged ({why}); save it anew")
