"""Memory that a prefix cache takes for a cached token, measured from outside, whatever the cache is written in."""

import ctypes
import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.tree_peers import PrefixIndex

NODE_LEN = 1024
PAGE_SIZE = 16
STATUS = Path("/proc/self/statm")


def bytes_per_token(load: Callable[[], Callable[[int], PrefixIndex]], num_nodes: int = 4096) -> float:
    """Growth of the resident memory of a fresh process that caches `num_nodes` nodes of 1k tokens, a cached token.

    load: makes the cache in the fresh process, so it must be picklable. Linux only.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_grow, load, num_nodes).result()


def _grow(load: Callable[[], Callable[[int], PrefixIndex]], num_nodes: int) -> float:
    make = load()
    _fill(make(PAGE_SIZE), 8)  # what is allocated once only
    index = make(PAGE_SIZE)
    before = _resident_bytes()
    _fill(index, num_nodes)
    return (_resident_bytes() - before) / (num_nodes * NODE_LEN)


def _fill(index: PrefixIndex, num_nodes: int) -> None:
    rng = np.random.default_rng(0)
    pages_a_node = NODE_LEN // PAGE_SIZE
    for node in range(num_nodes):
        ids = rng.integers(50000, size=NODE_LEN, dtype=np.int32)
        pages = np.arange(1 + node * pages_a_node, 1 + (node + 1) * pages_a_node, dtype=np.int32)
        index.insert(index.prepare_keys(ids, 0)[1], index.prepare_pages(pages))


def _resident_bytes() -> int:
    """Resident memory once the allocator has given back what it holds in reserve."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
