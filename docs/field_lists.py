"""Docstrings here describe fields in prose, "name: what it is."; the site shows such paragraphs as lists."""

import re
from collections.abc import Collection

_SECTION = re.compile(r"(Args|Raises|Returns|Yields):\n")


def with_lists(docstring: str, names: Collection[str]) -> str:
    """`docstring` with a list for each paragraph that describes some of `names`, one or more names an entry.

    An entry begins with a line, or after a sentence in it. Sections (Raises:) and indented code stay as they are.
    """
    if not names:
        return docstring
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    entry = re.compile(rf"(?:^|(?<=[.;] )|(?<=\n))((?:{known})(?:, (?:{known}))*): ")
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(_as_list(paragraph, entry) for paragraph in paragraphs)


def _as_list(paragraph: str, entry: re.Pattern[str]) -> str:
    if _SECTION.match(paragraph) or paragraph.startswith("    "):
        return paragraph
    intro, *rest = entry.split(paragraph)
    if not rest:
        return paragraph
    entries = [
        f"- **{' '.join(named.split())}**: {' '.join(text.split())}"
        for named, text in zip(rest[::2], rest[1::2], strict=True)
    ]
    return "\n\n".join([*filter(None, [intro.strip()]), "\n".join(entries)])
