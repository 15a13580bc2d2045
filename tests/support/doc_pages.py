"""README and docs/*.md as tests read them: blocks of Python and what they print, shell lines, links, headings."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SHELL = re.compile(r"^ {4}(?:\$ )?((?:radix-jax|make|python|pip) .*)$", re.MULTILINE)
_INLINE = re.compile(r"`((?:radix-jax|make|python) [^`|]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
# What runs the model that has a name: seconds of compiles, and a file to fetch.
_REAL_MODEL = re.compile(r"LLM\(\"")


@dataclass(frozen=True)
class Block:
    """A ```python block and, where an ```output block follows at once, what it prints."""

    code: str
    output: str | None
    line: int


def python_blocks(page: Path) -> list[Block]:
    """Those of a page, in order.

    Raises:
        ValueError: an output block without code in front of it.
    """
    text, blocks, last_end = page.read_text(encoding="utf-8"), [], -1
    for found in _FENCED.finditer(text):
        kind, body = found.groups()
        if kind == "python":
            line = text.count("\n", 0, found.start()) + 2
            blocks.append(Block(body, None, line))
            last_end = found.end()
        elif kind == "output":
            if not blocks or text[last_end : found.start()].strip():
                raise ValueError(f"{page.name}: an output block does not follow a python block at once:\n{body}")
            blocks[-1] = Block(blocks[-1].code, body, blocks[-1].line)
    return blocks


def needs_real_model(page: Path) -> bool:
    """Whether any block of the page loads a model by its name."""
    return any(_REAL_MODEL.search(block.code) for block in python_blocks(page))


def run_page(page: Path) -> dict[str, Any]:
    """Run its blocks in order in one namespace, which is returned; each prints what its output block says.

    Raises:
        AssertionError: another output.
    """
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in python_blocks(page):
        printed = io.StringIO()
        # Empty lines in front, so that a traceback has the page's own numbers.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None:
            assert printed.getvalue().rstrip() == block.output.rstrip(), f"{page.name}, line {block.line}"
    return namespace


def shell_lines(page: Path) -> Iterator[str]:
    """Commands of indented blocks, less their comments and with continued lines put together, and those in the text."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    for line in [*_SHELL.findall(text), *_INLINE.findall(text)]:
        yield re.sub(r"\s+#.*", "", line)


def links(page: Path) -> list[str]:
    """Targets of links and images, outside of code."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return _LINK.findall(re.sub(r"`[^`\n]*`|^ {4}.*$", "", text, flags=re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Names of the headings, as links spell them; of the API page the names of what it documents, too."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", _FENCED.sub("", text), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
