"""Short texts that drawings are made of: counts, tokens, page ranges. All of them are printable and bounded."""

import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32

from radix_jax.viz.snapshot import NodeSnapshot, TreeSnapshot

Decode = Callable[[Sequence[int]], str]


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


def token_label(node: NodeSnapshot, decode: Decode | None, room: int) -> str:
    """The node's tokens in at most `room` columns: quoted text if they can be decoded, else their ids."""
    head = node.token_ids[:room].tolist()  # a token takes a column or more, nearly always
    text = " ".join(map(str, head)) if decode is None else repr(decode(head))
    return cut(text if len(head) == len(node.token_ids) else f"{text}…", room)


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
    """One line: page size, nodes and tokens of the whole tree, how many locked and how many not."""
    num_nodes = sum(node.state != "root" for node in snapshot.nodes)
    num_tokens, num_locked = snapshot.num_tokens, snapshot.num_locked_tokens
    return (
        f"page size {snapshot.page_size} · {count(num_nodes, 'node')} · "
        f"{count(num_tokens, 'token')} ({num_locked:,} locked, {num_tokens - num_locked:,} evictable)"
    )


def _char_columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
