"""Short texts that drawings are made of: counts, tokens, page ranges. All of them are printable and bounded."""

import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32

from radix_jax.viz.snapshot import NodeSnapshot, TailSnapshot, TreeSnapshot

Decode = Callable[[Sequence[int]], str]

_SHORTEST_TAIL = len("1 (page 1), ")


def count(number: int, noun: str) -> str:
    """`1 token`, `2,000 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """The text with every character that has no shape of its own (controls, direction marks, surrogates) escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def num_columns(text: str) -> int:
    """Columns of a fixed-width font: 2 for a wide East Asian character or emoji, 0 for a combining mark."""
    if text.isascii():
        return len(text)
    return sum(_char_columns(char) for char in text)


def cut(text: str, room: int) -> str:
    """The text in at most `room` columns; a cut end is shown as an ellipsis."""
    if num_columns(text) <= room:
        return text
    num_used, end = 1, 0
    while (width := _char_columns(text[end])) + num_used <= room:
        num_used += width
        end += 1
    return f"{text[:end]}…"


def token_label(item: NodeSnapshot | TailSnapshot, decode: Decode | None, room: int) -> str:
    """Its tokens in at most `room` columns: quoted text if they can be decoded, else their ids."""
    head = item.token_ids[:room].tolist()  # a token takes a column or more, nearly always
    text = " ".join(map(str, head)) if decode is None else repr(decode(head))
    return cut(text if len(head) == len(item.token_ids) else f"{text}…", room)


def tails_label(tails: Sequence[TailSnapshot], is_lost: bool, decode: Decode | None, room: int) -> str:
    """`tail: 5 6 7 (page 9)`, or how many there are and as many as fit, in at most `room` columns."""
    first = tails[: room // _SHORTEST_TAIL + 1]
    listed = ", ".join(f"{token_label(tail, decode, room)} ({_tail_place(tail)})" for tail in first)
    noun = "lost tail" if is_lost else "tail"
    head = noun if len(tails) == 1 else count(len(tails), noun)
    return cut(f"{head}: {listed}{'' if len(first) == len(tails) else '…'}", room)


def root_label(node: NodeSnapshot, room: int) -> str:
    """`root` for the namespace None, else the namespace."""
    return "root" if node.namespace is None else cut(f"namespace {printable(repr(node.namespace))}", room)


def page_ranges(page_ids: Int32[np.ndarray, " P"], room: int) -> str:
    """Page ids in their order, runs of them as `3–7`, in at most `room` columns."""
    if not len(page_ids):
        return "none"
    ends = np.flatnonzero(np.diff(page_ids) != 1)[: room + 1]
    firsts = page_ids[np.concatenate([[0], ends + 1])].tolist()
    lasts = page_ids[np.append(ends, len(page_ids) - 1)].tolist()
    runs = [f"{first}" if first == last else f"{first}–{last}" for first, last in zip(firsts, lasts, strict=True)]
    return cut(" ".join(runs), room)


def totals(snapshot: TreeSnapshot) -> str:
    """One line: page size, nodes and tokens of the whole tree, how many locked and how many not; pins and tails."""
    num_nodes = sum(node.state != "root" for node in snapshot.nodes)
    num_tokens, num_locked = snapshot.num_tokens, snapshot.num_locked_tokens
    parts = [
        f"page size {snapshot.page_size}",
        count(num_nodes, "node"),
        f"{count(num_tokens, 'token')} ({num_locked:,} locked, {num_tokens - num_locked:,} evictable)",
    ]
    if snapshot.num_pinned_tokens:
        parts.append(f"{snapshot.num_pinned_tokens:,} pinned")
    if snapshot.tails:
        num_tail_tokens = sum(len(tail.token_ids) for tail in snapshot.tails)
        parts.append(f"{count(len(snapshot.tails), 'tail')} of {count(num_tail_tokens, 'token')}")
    return " · ".join(parts)


def _tail_place(tail: TailSnapshot) -> str:
    locks = f", {count(tail.num_locks, 'lock')}" if tail.num_locks else ""
    return f"page {tail.page_id}{locks}"


def _char_columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
