"""SGLang's radix trees, taken from its wheel unpacked in a folder, behind the interface of `benchmarks.tree_peers`.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-*.whl -d DIR

The wheel's other dependencies are not needed: what its tree modules import beyond themselves is replaced, while this
program runs, by stand-ins that do nothing. torch is needed, since both trees keep their values in tensors.
"""

import importlib
import importlib.util
import sys
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tree_peers import Ids, PrefixIndex

PACKAGE = "sglang"
_MEM_CACHE = f"{PACKAGE}.srt.mem_cache"
_FULL_ATTENTION = 0  # of its kinds of attention, each with values of its own
_RUST_CORE = f"{_MEM_CACHE}.rust_tree_core.mem_cache"
# Modules that are taken from the folder; every other one of the package is a stand-in.
_REAL = {
    f"{_MEM_CACHE}.{name}"
    for name in ("base_prefix_cache", "cache_init_params", "events", "evict_policy", "radix_cache", "utils")
} | {
    _RUST_CORE,
    f"{_MEM_CACHE}.unified_cache.component_type",
}


class _StandInMeta(type):
    """A class with every attribute, each a stand-in again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


class StandIn(metaclass=_StandInMeta):
    """What a module that is not there seems to hold: calls, subscripts and attributes of it give it back."""


class _StandInModule(ModuleType):
    """A module, and a package, of stand-ins."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - it is never appended to

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class FolderFinder(MetaPathFinder, Loader):
    """Finds the package's tree modules in a folder and makes stand-ins of all its others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """A module of the package: from the folder, or a stand-in. Others are not ours."""
        if fullname.split(".")[0] != PACKAGE:
            return None
        if fullname in _REAL:
            return importlib.util.spec_from_file_location(fullname, self._find_file(fullname))
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty stand-in."""
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""

    def _find_file(self, fullname: str) -> Path:
        stem = self._folder.joinpath(*fullname.split("."))
        found = [*stem.parent.glob(f"{stem.name}.py"), *stem.parent.glob(f"{stem.name}.*.so")]
        if not found:
            raise ImportError(f"no {stem}.py or .so; unpack a wheel of sglang 0.5.23 for this Python in {self._folder}")
        return found[0]


class SglangMatch(NamedTuple):
    """cached_len: tokens that matched. node: of the tree. slots: a tensor of them. receipt: of the lock, or None."""

    cached_len: int
    node: Any
    slots: Any
    receipt: Any


class RustCore:
    """The Rust core of SGLang's tree, called through its binding alone, without the Python classes around it."""

    name = "SGLang Rust core"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._core = importlib.import_module(_RUST_CORE)
        settings = self._core.TreeCoreInitParamsBinding(
            eviction_policy="lru",
            slru_protected_threshold=2,
            tlru_tail_budget=0,
            tlru_float_config=None,
            page_size=page_size,
            is_write_back=False,
            enable_hicache=False,
            write_through_threshold=256,
            device="cpu",
            swa_sliding_window_size=None,
            swa_req_ring=False,
            enable_kv_cache_events=False,
            dynamo_kv_event_format=False,
            mamba_cache_chunk_size=None,
            mamba_max_states_per_path=None,
        )
        self._tree = self._core.RustUnifiedTreeCoreBinding(settings, [_FULL_ATTENTION])
        self._root = self._tree.root_node_handle(None)

    def prepare_keys(self, ids: Ids, prompt_len: int) -> tuple[array, array]:
        """Arrays of int64 ids."""
        return _to_array(ids[:prompt_len]), _to_array(ids[: len(ids) // self.page_size * self.page_size])

    def prepare_pages(self, pages: Ids) -> Any:
        """A tensor of the pages' slots."""
        return _to_slots(pages, self.page_size)

    def match(self, key: array) -> SglangMatch:
        """Match, and collect the slots."""
        found = self._tree.match_prefix(self._core.MatchParamsBinding(key=key))
        node = found.last_device_node_id
        slots = self._tree.collect_full_device_indices(node, self._root)
        return SglangMatch(found.device_prefix_len, node, slots, None)

    def start(self, key: array) -> SglangMatch:
        """Match, collect and lock."""
        found = self._tree.match_prefix(self._core.MatchParamsBinding(key=key))
        node = found.last_device_node_id
        slots = self._tree.collect_full_device_indices(node, self._root)
        return SglangMatch(found.device_prefix_len, node, slots, self._tree.inc_lock_ref(node))

    def insert(self, key: array, value: Any) -> int:
        """Insert in one step."""
        return self._tree.insert(self._core.InsertParamsBinding(key=key, value=value)).prefix_len

    def end(self, started: SglangMatch, key: array, value: Any) -> int:
        """Insert and unlock."""
        cached_len = self._tree.insert(self._core.InsertParamsBinding(key=key, value=value)).prefix_len
        receipt = started.receipt
        self._tree.dec_lock_ref(
            started.node,
            self._core.DecLockRefParamsBinding(
                node_id=started.node,
                skipped_lock_components=[],
                component_lock_uuids=receipt.component_lock_uuids,
                component_host_lock_uuids=receipt.component_host_lock_uuids,
            ),
            False,
        )
        return cached_len

    def evict(self, num_tokens: int) -> int:
        """Walk leaf by leaf, as SGLang's cache drives it."""
        tree = self._tree
        num_evicted = 0
        tree.evict_device_start(_FULL_ATTENTION, num_tokens)
        while num_evicted < num_tokens:
            step = tree.evict_device_next_node(_FULL_ATTENTION, {_FULL_ATTENTION: num_evicted})
            if step.node_id is not None:
                step = tree.evict_device_leaf(step.node_id)
            elif not step.made_progress:
                break
            num_evicted += step.tracker.get(_FULL_ATTENTION, 0)
        tree.evict_device_end(_FULL_ATTENTION)
        return num_evicted

    def cached_len(self, matched: SglangMatch) -> int:
        """Tokens that matched."""
        return matched.cached_len

    def page_ids(self, matched: SglangMatch) -> Ids:
        """Pages of the slots that matched."""
        return _to_pages(matched.slots, self.page_size)

    def size(self) -> int:
        """All cached tokens."""
        return self._tree.total_size()[0]


class _Allocator:
    """Takes the slots that the Python tree frees."""

    device = "cpu"

    def free_segment(self, slots: Any, start_pos: int) -> None:
        """Nothing is kept."""


class PythonTree:
    """SGLang's `RadixCache` in Python."""

    name = "SGLang Python tree"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._calls = importlib.import_module(f"{_MEM_CACHE}.base_prefix_cache")
        module = importlib.import_module(f"{_MEM_CACHE}.radix_cache")
        self._key = module.RadixKey
        self._tree = module.RadixCache.create_simulated(page_size=page_size, mock_allocator=_Allocator())

    def prepare_keys(self, ids: Ids, prompt_len: int) -> tuple[Any, Any]:
        """Its keys, of arrays of int64 ids."""
        full_len = len(ids) // self.page_size * self.page_size
        return self._key(_to_array(ids[:prompt_len])), self._key(_to_array(ids[:full_len]))

    def prepare_pages(self, pages: Ids) -> Any:
        """A tensor of the pages' slots."""
        return _to_slots(pages, self.page_size)

    def match(self, key: Any) -> SglangMatch:
        """Match, and collect the slots."""
        found = self._tree.match_prefix(self._calls.MatchPrefixParams(key=key))
        node = found.last_device_node
        return SglangMatch(found.device_prefix_len, node, self._tree.path_device_indices(node), None)

    def start(self, key: Any) -> SglangMatch:
        """Match, collect and lock."""
        found = self._tree.match_prefix(self._calls.MatchPrefixParams(key=key))
        node = found.last_device_node
        slots = self._tree.path_device_indices(node)
        self._tree.inc_lock_ref(node)
        return SglangMatch(found.device_prefix_len, node, slots, None)

    def insert(self, key: Any, value: Any) -> int:
        """Insert."""
        return self._tree.insert(self._calls.InsertParams(key=key, value=value)).prefix_len

    def end(self, started: SglangMatch, key: Any, value: Any) -> int:
        """Insert and unlock."""
        cached_len = self._tree.insert(self._calls.InsertParams(key=key, value=value)).prefix_len
        self._tree.dec_lock_ref(started.node)
        return cached_len

    def evict(self, num_tokens: int) -> int:
        """Evict whole leaves."""
        return self._tree.evict(self._calls.EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    def cached_len(self, matched: SglangMatch) -> int:
        """Tokens that matched."""
        return matched.cached_len

    def page_ids(self, matched: SglangMatch) -> Ids:
        """Pages of the slots that matched."""
        return _to_pages(matched.slots, self.page_size)

    def size(self) -> int:
        """All cached tokens."""
        return self._tree.evictable_size() + self._tree.protected_size()


def load_sglang(folder: Path) -> dict[str, Callable[[int], PrefixIndex]]:
    """SGLang's trees by name, each made from a page size, of the wheel that is unpacked in `folder`.

    Raises:
        ImportError: torch is missing, or the folder holds no such wheel for this Python.
    """
    torch = importlib.import_module("torch")  # first: the core is linked against what it loads
    torch.set_num_threads(1)
    if not any(isinstance(finder, FolderFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FolderFinder(folder))
    trees: list[type[RustCore] | type[PythonTree]] = [RustCore, PythonTree]
    for tree in trees:
        tree(1)
    return {tree.name: tree for tree in trees}


def sglang_version(folder: Path) -> str:
    """Version of the wheel unpacked in `folder`, by the name of its metadata folder."""
    return next((found.name.split("-")[1].removesuffix(".dist") for found in folder.glob("sglang-*.dist-info")), "?")


def _to_array(ids: Ids) -> array:
    return array("q", ids.astype(np.int64).tobytes())


def _to_slots(pages: Ids, page_size: int) -> Any:
    slots = pages.astype(np.int64)[:, None] * page_size + np.arange(page_size)
    return sys.modules["torch"].from_numpy(slots.reshape(-1))


def _to_pages(slots: Any, page_size: int) -> Ids:
    return (slots.numpy()[::page_size] // page_size).astype(np.int32)
