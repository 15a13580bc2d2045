"""The command line: radix-jax generate | chat | demo | pull | tree | replay | aot | check-kernel | check-model |
tune."""

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

import radix_jax
from radix_jax.cli_aot import aot
from radix_jax.cli_kernels import check_kernel
from radix_jax.cli_models import check_model
from radix_jax.cli_options import with_fields
from radix_jax.cli_replay import replay
from radix_jax.cli_tune import tune
from radix_jax.config import EngineConfig
from radix_jax.request import RequestOutput, SamplingParams

# What sampling offers at the command line; --seed is the engine's, which seeds requests without one of their own.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "ignore_eos")
_DEFAULT_MODEL = "smollm2-135m-instruct"
_EXIT_BAD_INPUT = 2
_EXIT_TERMINATED = 128 + signal.SIGTERM

Model = Annotated[
    str, typer.Option("--model", "-m", help="built-in name, hub id, folder with safetensors, or .gguf file")
]
Prompts = Annotated[list[str], typer.Argument(help="text to continue; - is all of standard input")]

app = typer.Typer(
    name="radix-jax",
    help="RadixAttention in JAX: an LLM inference engine in which KV belongs to prefixes instead of requests.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(replay)
app.command()(aot)
app.command()(check_kernel)
app.command()(check_model)
app.command()(tune)


def main() -> None:
    """Run the command line. Bad input is told in one line and exits with 2; an interrupt exits with 130."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_EXIT_BAD_INPUT)


@app.command()
@with_fields("config", EngineConfig)
@with_fields("sampling", SamplingParams, _SAMPLING, temperature=0.0, max_tokens=128)
def generate(
    prompts: Prompts,
    sampling: SamplingParams,
    config: EngineConfig,
    model: Model = _DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object a prompt")] = False,
) -> None:
    """Continue one text, or several at once.

    One text is printed as it is generated. With --json: prompt, text, token_ids, prompt_tokens, cached_tokens and
    finish_reason, or prompt and error.
    """
    texts = _read(prompts)
    with radix_jax.LLM(model, **dataclasses.asdict(config)) as llm:
        if len(texts) == 1 and not as_json and sys.stdout.isatty():
            _print_stream(llm, texts[0], sampling)
            return
        outputs = llm.generate(texts, sampling)
    for number, output in enumerate(outputs, 1):
        print(_as_json(output) if as_json else _as_text(output, number, len(outputs)))
    if any(output.error for output in outputs):
        raise typer.Exit(_EXIT_BAD_INPUT)


@app.command()
@with_fields("config", EngineConfig)
@with_fields("sampling", SamplingParams, _SAMPLING, temperature=0.0, max_tokens=512)
def chat(sampling: SamplingParams, config: EngineConfig, model: Model = _DEFAULT_MODEL) -> None:
    """Talk with a model.

    A line is a message. Ctrl-C ends an answer, Ctrl-D the chat. From a pipe, the answers alone are printed.
    """
    from radix_jax.terminal import Chat

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        # `input` lets a line be edited, and lines before be recalled, once this is loaded.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    with radix_jax.LLM(model, **dataclasses.asdict(config)) as llm:
        Chat(llm, sampling, interactive=interactive).run()


@app.command()
def demo(
    model: Model = _DEFAULT_MODEL,
    record: Annotated[str | None, typer.Option(help="file to write each request to, for `radix-jax replay`")] = None,
) -> None:
    """Show what the radix cache saves.

    Asks questions that share a long system prompt, with the cache and without it, and draws the tree. Exits with 1 if
    an answer differs.
    """
    from radix_jax.demo import run_demo

    if not run_demo(model, record=record):
        raise typer.Exit(1)


@app.command()
def pull(name: Annotated[str, typer.Argument(help="built-in name, hub id, folder or .gguf file")]) -> None:
    """Fetch a model and print where it lies.

    What is on this machine already is not fetched again.
    """
    from radix_jax.checkpoints import resolve

    print(resolve(name))


@app.command()
@with_fields("config", EngineConfig, page_size=1)
@with_fields("sampling", SamplingParams, _SAMPLING, temperature=0.0)
def tree(prompts: Prompts, sampling: SamplingParams, config: EngineConfig, model: Model = _DEFAULT_MODEL) -> None:
    """Draw the radix tree that texts leave.

    Each text is continued, and its tokens stay in the cache.
    """
    from radix_jax.terminal import draw_tree

    texts = _read(prompts)
    with radix_jax.LLM(model, **dataclasses.asdict(config)) as llm:
        llm.generate(texts, sampling)
        print(draw_tree(llm.cache.snapshot(), llm.tokenizer))


def _read(prompts: Sequence[str]) -> list[str]:
    """The prompts, with `-` replaced by what standard input holds, less one newline at its end."""
    return [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]


def _print_stream(llm: "radix_jax.LLM", prompt: str, sampling: SamplingParams) -> None:
    from radix_jax.terminal import stream_text

    for piece, _ in stream_text(llm, llm.tokenizer.encode(prompt), sampling):
        print(piece, end="", flush=True)
    print()


def _as_json(output: RequestOutput) -> str:
    if output.error:
        return json.dumps({"prompt": output.prompt, "error": output.error}, ensure_ascii=False)
    [completion] = output.outputs
    fields: dict[str, Any] = {
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "finish_reason": completion.finish_reason,
    }
    return json.dumps(fields, ensure_ascii=False)


def _as_text(output: RequestOutput, number: int, num_outputs: int) -> str:
    """The text alone, or under its prompt where there are several. A refusal is in the log already."""
    text = f"(refused: {output.error})" if output.error else output.outputs[0].text
    return text if num_outputs == 1 else f"[{number}] {output.prompt}\n{text}\n"


def _terminate(*_: object) -> NoReturn:
    """SIGTERM ends the program as an exit does, so that what it started and its temporary files go with it."""
    sys.exit(_EXIT_TERMINATED)
