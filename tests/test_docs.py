"""The site's pages: their Python runs and prints what they say, their commands exist, their links lead somewhere."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from doc_pages import DOCS, PAGES, README, ROOT, anchors, links, needs_real_model, run_page, shell_lines
from tiny import SMALL, dense_greedy, generate, greedy, tiny_llama, token_ids

from docs.field_lists import with_lists
from radix_jax import Engine, EngineConfig, attention_backends
from radix_jax.cli import app

TEXTS = [*sorted(ROOT.glob("*.md")), *PAGES]
COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
# The code of one is the text of two examples, in parts; the other writes a file. They have tests of their own:
# test_own_model_examples.py and test_cache_control_doc.py.
RUN_ELSEWHERE = {"own_model.md", "cache_control.md"}
RUN_HERE = [page for page in PAGES if not needs_real_model(page) and page.name not in RUN_ELSEWHERE]
SLOW = [page for page in PAGES if needs_real_model(page)]


def name_of(page: Path) -> str:
    return page.name


@pytest.fixture(scope="module", autouse=True)
def own_names() -> Iterator[None]:
    """The attention backends that pages register are forgotten."""
    before = dict(attention_backends._registered)
    yield
    attention_backends._registered.clear()
    attention_backends._registered.update(before)


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_python_runs(page: Path) -> None:
    namespace = run_page(page)
    if page.name == "kernels.md":
        my_attention_serves_a_tiny_model(namespace)


def my_attention_serves_a_tiny_model(namespace: dict[str, Any]) -> None:
    """The page's own last step takes the real model."""
    assert namespace["report"].passed
    prompts = [[5], list(range(30)), list(range(40, 51))]
    engine = Engine(tiny_llama(), None, EngineConfig(**SMALL, attention_backend="mine"))
    assert engine.config.attention_backend == "mine"
    outputs = generate(engine, prompts, greedy(4))
    assert token_ids(outputs) == [dense_greedy(prompt, 4) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_python_runs_on_the_real_model(page: Path) -> None:
    run_page(page)


def test_pages_with_code_are_found() -> None:
    assert {"kernels.md", "radix_attention.md", "replay.md", "research.md"} <= {page.name for page in RUN_HERE}
    assert {"index.md", "quick_start.md"} <= {page.name for page in SLOW}


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.is_relative_to(ROOT.resolve()), f"{link} leads out of the repository"
        assert file.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(file) or anchor.rpartition(".")[0] in anchors(file), (
            f"{link}: no heading"
        )


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_commands_exist(page: Path) -> None:
    for line in shell_lines(page):
        # `make test VENV=...`, `python -m benchmarks.NAME --option`, `radix-jax NAME --option`
        program, *words = shlex.split(line)
        if program == "radix-jax" and not words[0].startswith("-"):
            assert words[0] in COMMANDS, line
            options = {option for parameter in COMMANDS[words[0]].params for option in parameter.opts}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= options | {"--help"}, f"{line}: no {given - options}"
        elif program == "make":
            assert re.search(rf"^{re.escape(words[0])}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        elif program == "python" and words[0] == "-m" and words[1].startswith("benchmarks"):
            assert (ROOT / f"{words[1].replace('.', '/')}.py").exists(), line
        elif program == "python" and words[0].endswith(".py"):
            assert words[0] == "examples/NAME.py" or (ROOT / words[0]).exists(), line


def test_commands_are_found() -> None:
    found = {tuple(line.split()[:2]) for page in [README, *PAGES] for line in shell_lines(page)}
    assert {("radix-jax", "replay"), ("make", "demo"), ("python", "-m"), ("radix-jax", "check-kernel")} <= found


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = [page for entry in site["nav"] for page in entry.values()]
    assert sorted(named) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_every_picture_is_on_a_page() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    assert {file for file in (DOCS / "images").iterdir() if file.resolve() not in shown} == {
        DOCS
        / "images"
        / "deep_tree.svg",  # what the drawing does with many nodes; they prove the viz, and tell nothing
        DOCS / "images" / "large_tree.svg",
    }


def test_described_fields_become_lists() -> None:
    described = "A node.\n\nids: of the edge. num_locks, num_pins: on it\nor below. Note: none.\n\nRaises:\n    ids: no"
    assert with_lists(described, {"ids", "num_locks", "num_pins"}) == (
        "A node.\n\n- **ids**: of the edge.\n- **num_locks, num_pins**: on it or below. Note: none.\n\n"
        "Raises:\n    ids: no"
    )
    assert with_lists(described, ()) == described
