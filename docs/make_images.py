"""Remakes docs/images: `python docs/make_images.py`.

Each picture is drawn from a tree that is built here, call by call.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from radix_jax.cache import PagePool, PrefixCache, PrefixHandle, RadixTree
from radix_jax.viz import PoolSnapshot, Replay, render_svg

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    """Write all pictures."""
    IMAGES.mkdir(exist_ok=True)
    for name, content in make_images().items():
        (IMAGES / name).write_text(content, encoding="utf-8")
        print(f"{IMAGES / name}: {len(content.encode()):,} bytes")


def make_images() -> dict[str, str]:
    """File name -> content of each picture."""
    requests = textbook_requests()
    return {
        "small_tree.svg": small_tree(),
        "large_tree.svg": render_svg(large_tree().snapshot(), max_nodes=28, max_depth=4),
        "deep_tree.svg": render_svg(deep_tree().snapshot()),
        "textbook_splits.svg": textbook_splits().render_svg(),
        "textbook_requests.svg": requests.render_svg(),
        "textbook_requests.html": requests.render_html("Two requests share a prefix"),
        "pins_and_tails.svg": pins_and_tails(),
        "partial_pages.svg": partial_pages().render_svg(),
        "same_question.svg": same_question(),
        "leaves_first.svg": leaves_first().render_svg(),
    }


class Words:
    """A vocabulary of whole words with their spaces, made as they come."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, a word each."""
        ids = []
        for number, word in enumerate(text.split(" ")):
            piece = f" {word}" if number else word
            if piece not in self._words:
                self._words.append(piece)
            ids.append(self._words.index(piece))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        return "".join(self._words[number] for number in ids)


def small_tree() -> str:
    """Chat prompts under one system prompt, one of them running, and a second tenant; tokens decoded."""
    words = Words()
    cache = PrefixCache(RadixTree(page_size=1), PagePool(200))
    system = "You answer in one line. "
    for question in (
        "What is a radix tree?",
        "What is a page table?",
        "Write a haiku on caches.",
        "俳句 を 一つ 書いて",
    ):
        _serve(cache, words.encode(system + question))
    for _ in range(2):
        _serve(cache, words.encode(f"{system}What is a radix tree? A tree whose edges hold whole strings."))
    _serve(cache, words.encode("Translate <b>this</b>"), namespace=("tenant", 7))
    running = cache.match_prefix(words.encode(f"{system}What is a page table?"))
    cache.lock(running.handle)
    return render_svg(cache.tree.snapshot(), words.decode)


def large_tree() -> RadixTree:
    """3,000 requests: 12 system prompts, unevenly liked, and conversations of several turns below each."""
    draw = random.Random(20)
    cache = PrefixCache(RadixTree(page_size=16), PagePool(80_000))

    def tokens(at_least: int, below: int) -> list[int]:
        return [draw.randrange(32_000) for _ in range(draw.randrange(at_least, below))]

    talks = [[tokens(200, 1_200)] for _ in range(12)]
    for _ in range(3_000):
        talk = talks[min(int(draw.paretovariate(0.8)), 12) - 1]
        before = talk[0] if draw.random() < 0.3 else draw.choice(talk)
        turn = before + tokens(40, 400)
        _serve(cache, turn)
        if len(turn) < 4_000:
            talk.append(turn)
    for talk in talks[:3]:
        cache.lock(cache.match_prefix(talk[-1]).handle)
    return cache.tree


def deep_tree() -> RadixTree:
    """A conversation of 30 turns, a side branch every few turns."""
    tree = RadixTree(page_size=4)
    turns: list[int] = []
    for turn in range(30):
        turns += range(100 * turn, 100 * turn + 24)
        tree.insert_prefix(turns, range(1, len(turns) // 4 + 1))
        if turn % 3 == 0:
            side = [*turns[:-12], *range(9_000 + turn, 9_008 + turn)]
            tree.insert_prefix(side, range(1_000 + turn, 1_000 + turn + len(side) // 4))
    tree.lock(tree.match_prefix(turns[:72]).handle)
    return tree


def textbook_splits() -> Replay:
    """A, B and C inserted: B splits A's node after 3 tokens, C splits what is left of it after 2."""
    tree = RadixTree(page_size=1)
    replay = Replay()
    replay.add("An empty tree", tree.snapshot())
    for name, ids, first_page, note in (
        ("A", [101, 11, 12, 21, 22], 1, "All five tokens are one edge."),
        ("B", [101, 11, 12, 31, 32], 11, "B shares three tokens with A: the edge is split after them. No KV moves."),
        ("C", [101, 11, 99], 21, "C shares two of those three: they are split once more."),
    ):
        tree.insert_prefix(ids, range(first_page, first_page + len(ids)))
        replay.add(f"Insert {name} = {ids}", tree.snapshot(), note)
    return replay


def textbook_requests() -> Replay:
    """R1 and R2 share S: match, lock, allocate, insert, unlock, evict, with a pool of 10 pages."""
    shared = [900, 10, 11, 12]
    first, second = [*shared, 31, 32], [*shared, 41, 42, 43]
    cache = PrefixCache(RadixTree(page_size=1), PagePool(11))
    replay = Replay()
    private: list[int] = []

    def show(title: str, note: str) -> None:
        pool = PoolSnapshot(cache.pool.num_pages, np.array(private, np.int32))
        replay.add(title, cache.tree.snapshot(), note, pool)

    _serve(cache, shared)
    show("S is cached", f"S = {shared} came from a request that is over, so nothing is locked.")
    handles, tables = [], []
    for name, ids in (("R1", first), ("R2", second)):
        match = cache.match_prefix(ids[:-1])
        show(f"Match {name} = {ids}", f"{match.cached_len} of {len(ids)} tokens are cached. Only the rest is computed.")
        cache.lock(match.handle)
        show(f"Lock {name}", f"The {match.cached_len} matched tokens can't be evicted while {name} runs.")
        own = cache.allocate(len(ids) - match.cached_len)
        private.extend(own.tolist())
        show(f"Allocate for {name}", f"Pages {own[0]} to {own[-1]} take the KV of {ids[4:]}; private to {name} so far.")
        done = cache.commit(ids, np.concatenate([match.pages, own]), match.handle)
        private.clear()
        show(f"Insert {name}", f"{name}'s pages are the tree's now, and its lock reaches to its end.")
        handles.append(done.handle)
        tables.append(done.pages)
    cache.release(handles[0], tables[0])
    show("Unlock R1", "R1 is over. Its own end is evictable; S stays locked through R2.")
    more = sorted(cache.allocate(3).tolist())
    private.extend(more)
    show(
        "Evict to allocate 3 more",
        f"R2 needs 3 pages and 1 was free, so R1's own end left the tree. Pages {more[0]}, {more[1]} "
        f"and {more[2]} are R2's now.",
    )
    private.clear()
    cache.free(more)
    cache.release(handles[1], tables[1])
    show("Unlock R2", "Nothing is locked. All that is cached waits for the next request, or for eviction.")
    return replay


def pins_and_tails() -> str:
    """Prompts at four words a page: one pinned and running, one pinned, one a tenant's, shorter than a page."""
    words = Words()
    cache = PrefixCache(RadixTree(page_size=4, max_pinned_tokens=64), PagePool(100))
    system = "You answer in one short line."
    for question in ("What is a page table?", "What is a radix tree?", "Sum up this chat."):
        _serve(cache, words.encode(f"{system} {question}"))
    _serve(cache, words.encode("Good morning"), namespace=("tenant", 7))
    agent = words.encode("Use the tools when you need them, and say which ones.")
    _serve(cache, agent)
    cache.tree.pin(agent, ttl=600)
    running = words.encode(f"{system} What is a page table?")
    cache.tree.pin(running[:4], ttl=600)
    match = cache.match_prefix(running[:-1])
    assert match.donor_handle is not None
    cache.lock(match.handle)
    cache.lock(match.donor_handle)
    return render_svg(cache.snapshot(), words.decode)


def partial_pages() -> Replay:
    """R2 begins as R1 does, up to the middle of a page: match, copy, insert; a pin; and what is evicted first."""
    first, second = [*range(10, 17)], [*range(10, 16), 26, 27]
    cache = PrefixCache(RadixTree(page_size=4, max_pinned_tokens=4), PagePool(9))
    replay = Replay()
    private: list[int] = []

    def show(title: str, note: str) -> None:
        replay.add(title, cache.snapshot(), note, PoolSnapshot(cache.pool.num_pages, np.array(private, np.int32)))

    _serve(cache, first)
    show("R1 is over", f"R1 = {first}. Its full page is in the tree, the other one is a tail.")
    match = cache.match_prefix(second[:-1])
    assert match.donor_handle is not None
    cache.lock(match.handle)
    cache.lock(match.donor_handle)
    show(
        f"Match and lock R2 = {second}",
        f"{match.cached_len} tokens in whole pages, then {match.donor_len} in the tail.",
    )
    own = cache.allocate(1)
    private.extend(own.tolist())
    show("Copy", f"The device copies the first {match.donor_len} slots of page {match.donor_page} to page {own[0]}.")
    cache.unlock(match.donor_handle)
    done = cache.commit(second, np.concatenate([match.pages, own]), match.handle)
    private.clear()
    show("Insert R2", f"R2 computed the other {len(second) - 6} tokens. Its page is full, so the tree takes it.")
    cache.release(done.handle, done.pages)
    cache.tree.pin(second[:4], ttl=600)
    show("R2 is over; pin the page that both share", "A pinned page is evicted when nothing else is left.")
    private.extend(cache.allocate(6).tolist())
    show("Allocate 6", "5 pages were free. Full pages without a pin go first.")
    private.extend(cache.allocate(1).tolist())
    show("Allocate 1 more", "Tails go next. What is pinned is left for the last.")
    return replay


def same_question() -> str:
    """One question after two system prompts, and another one after the first: what comes later is not shared."""
    words = Words()
    cache = PrefixCache(RadixTree(page_size=1), PagePool(100))
    for prompt in (
        "Answer in one line. What is a page?",
        "Answer in one line. What is a tree?",
        "Answer in French. What is a page?",
    ):
        _serve(cache, words.encode(prompt))
    return render_svg(cache.tree.snapshot(), words.decode)


def leaves_first() -> Replay:
    """S with three ends, one of them locked: evict takes leaves out of the tree, free gives their pages to the pool."""
    tree, pool = RadixTree(page_size=1), PagePool(11)
    replay = Replay()
    private: list[int] = []

    def show(title: str, note: str) -> None:
        replay.add(title, tree.snapshot(), note, PoolSnapshot(pool.num_pages, np.array(private, np.int32)))

    def insert(ids: list[int]) -> PrefixHandle:
        cached = tree.match_pages(ids)
        return tree.insert_prefix(ids, [*cached, *pool.allocate(len(ids) - len(cached))]).handle

    def evict(num_tokens: int) -> None:
        private.extend(tree.evict(num_tokens).tolist())

    def free() -> None:
        pool.free(private)
        private.clear()

    shared = [900, 10, 11]
    running = insert([*shared, 21, 22])
    insert([*shared, 31, 32])
    insert([*shared, 41])
    tree.lock(running)
    show("Three prompts are cached, one of them runs", "A lock counts on its node and on all nodes above it.")
    evict(2)
    show("Evict 2", "The unlocked leaf that was used longest ago left the tree. Its pages are the caller's.")
    free()
    show("Free them", "The pool has the pages back; whoever allocates next may get them.")
    evict(100)
    free()
    show("Evict all that can go, and free it", "[41] went. [900, 10, 11] stays, as it lies above what is locked.")
    tree.unlock(running)
    evict(1)
    free()
    show("Unlock, evict 1, free", "Whole leaves go. The node above has no child any more: now it is the leaf.")
    return replay


def _serve(cache: PrefixCache, ids: list[int], namespace: object = None) -> None:
    """One request from start to end."""
    match = cache.match_prefix(ids, namespace)
    cache.lock(match.handle)
    own = cache.allocate(-(-len(ids) // cache.page_size) - len(match.pages))
    done = cache.commit(ids, np.concatenate([match.pages, own]), match.handle, namespace)
    cache.release(done.handle, done.pages, ids, namespace)


if __name__ == "__main__":
    main()
