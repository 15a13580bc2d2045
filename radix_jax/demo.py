"""The demo: questions that share a long system prompt, with the radix cache and without, and what the cache saved."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table

import radix_jax
from radix_jax.checkpoints import resolve
from radix_jax.engine import Engine
from radix_jax.llm import LLM
from radix_jax.request import RequestOutput, SamplingParams
from radix_jax.terminal import draw_tree, terminal_width
from radix_jax.text import AnyTokenizer
from radix_jax.viz import TreeSnapshot

# Few step shapes, as each takes seconds to compile; float32, so that both runs can be compared token for token; pages
# of one token, so that the tree shows each place where two prompts part.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 1,
    "num_pages": 4097,
    "max_model_len": 768,
    "max_prefill_tokens": 256,
    "max_running_requests": 8,
}


@dataclass(frozen=True)
class Script:
    """What is asked. questions: all at once, in two rounds, each after system_prompt. turns: one chat after the same.

    max_tokens: of one answer.
    """

    system_prompt: str
    questions: tuple[str, ...]
    turns: tuple[str, ...]
    max_tokens: int


# Questions whose answers do not hang on rounding: the two best tokens are never closer than 0.02.
SCRIPT = Script(
    system_prompt="""\
You are Ada, a helpful tutor who explains the natural world to a class of curious ten-year-old children. You know \
physics, chemistry, biology, geography and the history of science, and you love a good question.

How you answer:
Answer in one short and simple sentence. Start with the fact itself, not with a greeting and not with praise for the \
question. Use everyday words, and where a technical word is needed, say at once what it means. Give numbers with \
their units, and round them so that they can be remembered. Never invent a number. If something is not known, say \
that nobody knows it yet, because open questions are the best part of science.

What the class has learned so far:
The Sun is a star, a huge ball of hot gas, and the Earth goes around it once a year. The Earth turns around its own \
axis once a day, which makes day and night. The Moon goes around the Earth in about four weeks, and it shines only \
because it reflects the light of the Sun. Everything is made of atoms, which are far too small to be seen. Water is \
a liquid; when it freezes it becomes ice, and when it boils it becomes steam. Sound is a trembling of the air, and \
light is much faster than sound. Plants make their own food from water, air and sunlight, and animals eat plants or \
other animals. The heart pumps blood through the body, the lungs take oxygen out of the air, and the brain tells the \
muscles what to do. Magnets pull on iron, and a compass is a small magnet that points to the north.

What the class likes:
The children like planets, volcanoes, whales, dinosaurs and anything that can be tried out at home with a glass of \
water, a balloon, a candle or a magnet. An adult is always there when a candle is lit. They do not like long lists.

Remember: one short and simple sentence, the fact first.""",
    questions=(
        "Why is the sky blue?",
        "Which planet is closest to the Sun?",
        "What does the heart do?",
        "What is the largest animal on Earth?",
        "Why do we have day and night?",
        "How does a compass work?",
        "What do bees make?",
        "What is a dinosaur?",
        "Where do penguins live?",
        "What is the tallest mountain on Earth?",
        "What is the longest river in the world?",
        "What is rain?",
    ),
    turns=("What is a whale?", "What does it eat?", "How long does it live?"),
    max_tokens=24,
)


@dataclass(frozen=True)
class Part:
    """One part of a run. outputs: one a question, in their order. seconds_s: nothing was compiled in them."""

    title: str
    questions: tuple[str, ...]
    outputs: tuple[RequestOutput, ...]
    seconds_s: float
    num_prefill_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that came from the cache."""
        return sum(output.cached_tokens for output in self.outputs)

    @property
    def hit_rate(self) -> float:
        """Their share."""
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(_generated(output)) for output in self.outputs)


def run_demo(model: str, script: Script = SCRIPT, console: Console | None = None, *, record: str | None = None) -> bool:
    """Run the script with the cache and without it, and show both; False if an answer differs.

    model: as LLM takes it. record: as in EngineConfig, of the run with the cache.

    Raises:
        ValueError: the model cannot be found or loaded, or the script does not fit its context.
    """
    console = console or Console(highlight=False, width=terminal_width())
    path = resolve(model)
    start_s = time.perf_counter()
    with LLM(path, **SETTINGS, record=record) as llm:
        _print_model(console, llm.engine, path, time.perf_counter() - start_s)
        with_cache, snapshot = _run(console, llm.engine, llm.tokenizer, script, shown=True)
        _print_heading(console, "the same once more, with the cache off")
        config = dataclasses.replace(llm.engine.config, enable_prefix_cache=False, record=None)
        params = llm.engine.params
        bare = Engine(params.config, params, config, eos_token_ids=llm.engine.eos_token_ids)
        without_cache, _ = _run(console, bare, llm.tokenizer, script, shown=False)
        bare.close()
        _print_comparison(console, with_cache, without_cache)
        differing = _differing(with_cache, without_cache)
        _print_verdict(console, with_cache, differing)
        _print_heading(console, "the radix tree as the last answer of the chat was begun")
        console.print(draw_tree(snapshot, llm.tokenizer), markup=False, soft_wrap=True)
    return not differing


def _run(
    console: Console, engine: Engine, tokenizer: AnyTokenizer, script: Script, *, shown: bool
) -> tuple[list[Part], TreeSnapshot]:
    """The parts of the script, and the tree as the chat's last answer was begun. All is compiled before."""
    console.print("compiling …", style="dim")
    engine.warm_up()
    stats = engine.stats()
    console.print(f"{stats.num_compiles} programs compiled in {stats.compile_s:.1f} s\n", style="dim")
    snapshots: list[TreeSnapshot] = []
    parts = []
    for part in _parts(engine, tokenizer, script, snapshots.append):
        parts.append(part)
        if shown:
            _print_part(console, part, tokenizer)
    return parts, snapshots[-1]


def _parts(
    engine: Engine, tokenizer: AnyTokenizer, script: Script, keep: Callable[[TreeSnapshot], None]
) -> Iterator[Part]:
    """Run the script, part by part. `keep` gets the tree as it stands when an answer of the chat is begun."""
    system = {"role": "system", "content": script.system_prompt}
    greedy = SamplingParams(temperature=0, max_tokens=script.max_tokens)
    prompts = [tokenizer.encode_chat([system, {"role": "user", "content": question}]) for question in script.questions]
    for title in ("round 1", "round 2"):
        yield _timed(engine, title, script.questions, lambda: _ask_all(engine, prompts, greedy))
    yield _timed(engine, "chat", script.turns, lambda: _talk(engine, tokenizer, system, script.turns, greedy, keep))


def _timed(engine: Engine, title: str, questions: tuple[str, ...], run: Callable[[], list[RequestOutput]]) -> Part:
    num_before = engine.stats().num_prefill_tokens
    start_s = time.perf_counter()
    outputs = tuple(run())
    seconds_s = time.perf_counter() - start_s
    return Part(title, questions, outputs, seconds_s, engine.stats().num_prefill_tokens - num_before)


def _ask_all(engine: Engine, prompts: Sequence[np.ndarray], greedy: SamplingParams) -> list[RequestOutput]:
    """Everything at once; the scheduler decides who runs."""
    request_ids = [engine.add_request(prompt, greedy) for prompt in prompts]
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return [finished[request_id] for request_id in request_ids]


def _talk(
    engine: Engine,
    tokenizer: AnyTokenizer,
    system: dict[str, str],
    turns: Sequence[str],
    greedy: SamplingParams,
    keep: Callable[[TreeSnapshot], None],
) -> list[RequestOutput]:
    """One conversation: each turn's prompt is all that was said before, and the new question."""
    messages, outputs = [system], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        states = engine.stream(tokenizer.encode_chat(messages), greedy)
        first = next(states)
        keep(engine.cache.tree.snapshot())
        outputs.append([first, *states][-1])
        messages.append({"role": "assistant", "content": tokenizer.decode(_generated(outputs[-1]))})
    return outputs


def _print_heading(console: Console, words: str) -> None:
    console.print(Rule(words, style="dim", align="left"))
    console.print()


def _print_model(console: Console, engine: Engine, path: Path, load_s: float) -> None:
    params, config = engine.params, engine.config
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params.weights))
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("model", f"{path.name} · {num_params / 1e6:.1f}M parameters · {params.config.num_layers} layers"),
        ("from", str(path.parent)),
        ("loaded", f"as {config.dtype} in {load_s:.1f} s"),
        ("runs on", f"{jax.default_backend()} · {os.cpu_count()} CPU cores · jax {jax.__version__}"),
        ("cache", f"{engine.cache.pool.num_free:,} pages of {config.page_size} token{'s' * (config.page_size > 1)}"),
    ):
        facts.add_row(f"[dim]{name}[/dim]", escape(value))
    console.print(f"[bold]radix_jax {radix_jax.__version__}[/bold]")
    console.print(Padding(facts, (0, 0, 1, 0)))


def _print_part(console: Console, part: Part, tokenizer: AnyTokenizer) -> None:
    """Every question with its answer, its prompt tokens and how many of those came from the cache."""
    _print_heading(console, f"{part.title} · {part.hit_rate:.1%} of the prompt tokens came from the cache")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("prompt", justify="right", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True, style="green")
    table.add_column("question and answer")
    for question, output in zip(part.questions, part.outputs, strict=True):
        is_cut = output.outputs[0].finish_reason == "length"
        answer = " ".join(tokenizer.decode(_generated(output)).split()) + (" …" if is_cut else "")
        lengths = f"{len(output.prompt_token_ids):,}", f"{output.cached_tokens:,}"
        table.add_row(*lengths, f"[bold]{escape(question)}[/bold]\n{escape(answer)}")
    console.print(table)
    console.print()


def _print_comparison(console: Console, with_cache: Sequence[Part], without_cache: Sequence[Part]) -> None:
    """Tokens and seconds of both runs, part by part and in all."""
    on, off = [*with_cache, _joined(with_cache)], [*without_cache, _joined(without_cache)]
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    table.add_column("")
    for part in on:
        table.add_column(part.title, justify="right", no_wrap=True, style="bold" if part.title == "all" else None)
    for name, cells in (
        ("prompt tokens", [f"{part.num_prompt_tokens:,}" for part in on]),
        ("  from the cache", [f"{part.num_cached_tokens:,}" for part in on]),
        ("  hit rate", [f"{part.hit_rate:.1%}" for part in on]),
        ("  computed, cache on", [f"{part.num_prefill_tokens:,}" for part in on]),
        ("  computed, cache off", [f"{part.num_prefill_tokens:,}" for part in off]),
        ("output tokens", [f"{part.num_output_tokens:,}" for part in on]),
        ("  a second, cache on", [f"{part.num_output_tokens / part.seconds_s:.1f}" for part in on]),
        ("  a second, cache off", [f"{part.num_output_tokens / part.seconds_s:.1f}" for part in off]),
        ("seconds, cache on", [f"{part.seconds_s:.1f}" for part in on]),
        ("seconds, cache off", [f"{part.seconds_s:.1f}" for part in off]),
    ):
        table.add_row(name, *cells)
    console.print(table)
    console.print()


def _joined(parts: Sequence[Part]) -> Part:
    """All parts of a run as one."""
    return Part(
        title="all",
        questions=tuple(question for part in parts for question in part.questions),
        outputs=tuple(output for part in parts for output in part.outputs),
        seconds_s=sum(part.seconds_s for part in parts),
        num_prefill_tokens=sum(part.num_prefill_tokens for part in parts),
    )


def _print_verdict(console: Console, with_cache: Sequence[Part], differing: Sequence[str]) -> None:
    whole = _joined(with_cache)
    num_computed, num_prompt = whole.num_prefill_tokens, whole.num_prompt_tokens
    console.print(
        f"Prefill: {num_computed:,} of {num_prompt:,} prompt tokens computed, {num_prompt - num_computed:,} saved "
        f"({1 - num_computed / num_prompt:.1%}). Seconds are without compiling."
    )
    num_answers = len(whole.outputs)
    if not differing:
        console.print(f"Answers: all {num_answers} are the same, token for token, cache on and off.", style="green")
    else:
        console.print(f"Answers: {len(differing)} of {num_answers} differ with the cache off:", style="red")
        for name in differing:
            console.print(f"  {escape(name)}", style="red")
    console.print()


def _differing(with_cache: Sequence[Part], without_cache: Sequence[Part]) -> list[str]:
    """The questions whose answers are not the same in both runs."""
    return [
        f"{part.title}: {question}"
        for part, bare in zip(with_cache, without_cache, strict=True)
        for question, one, other in zip(part.questions, part.outputs, bare.outputs, strict=True)
        if _generated(one) != _generated(other)
    ]


def _generated(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids
