"""Chat templates: Jinja as Hugging Face's templates expect it, run in Jinja's sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from radix_jax.text.errors import TextError


class ChatTemplate:
    """A chat template and the special tokens that it may print, e.g. {"bos_token": "<s>"}."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: object, add_generation_prompt: bool = True) -> str:
        """The conversation [{"role": str, "content": str}, ...] as text, with the head of the assistant's next turn if
        asked for.

        Raises:
            TextError: messages are malformed, or the template is broken or refuses them; gives its own words.
        """
        template, checked = self._template, checked_messages(messages)
        try:
            return template.render(
                messages=checked,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program of somebody else's
            raise TextError(f"the chat template cannot render these messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of `messages`, which must be a non-empty sequence of {"role": str, "content": str, ...}.

    Raises:
        TextError: says which message is wrong, and how.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TextError(
            f"messages is a {type(messages).__name__}, not a list; give [{{'role': 'user', 'content': '...'}}]"
        )
    if not messages:
        raise TextError("messages is empty; give at least one {'role': ..., 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TextError(f"messages[{index}] is a {type(message).__name__}, not a dict with 'role' and 'content'")
        for key in ("role", "content"):
            if key not in message:
                raise TextError(f"messages[{index}] has no {key!r}")
            if not isinstance(message[key], str):
                raise TextError(f"messages[{index}][{key!r}] is a {type(message[key]).__name__}, not a str")
    return [dict(message) for message in messages]


def _environment() -> jinja2.Environment:
    """The names, filters and whitespace rules that templates on the hub are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's words for training; here it prints them."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads a plain set)

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
