"""Command-line options made from the fields of a dataclass, so that no field is listed twice."""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

_DESCRIBED = re.compile(r"(\w+(?:, \w+)*): (\S.*)")


def with_fields(
    parameter: str, kind: type, names: Sequence[str] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command that takes an object of the dataclass `kind` as `parameter`.

    Its command line gets an option for each of the fields `names` (all of them if None) in the place of `parameter`,
    with the type, the default and the words that the dataclass has for it. defaults: other defaults than those.
    """
    help_of = described_fields(kind)
    types = typing.get_type_hints(kind)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=Annotated[_option_type(types[field.name]), typer.Option(help=help_of[field.name])],
        )
        for field in dataclasses.fields(kind)
        if names is None or field.name in names
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        kept = [one for name, one in signature.parameters.items() if name != parameter]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            fields = {option.name: values.pop(option.name) for option in options}
            command(**values, **{parameter: kind(**fields)})

        shown = signature.replace(parameters=[*kept, *options])
        run.__signature__ = shown  # type: ignore[attr-defined]
        run.__annotations__ = {name: one.annotation for name, one in shown.parameters.items()}
        return run

    return decorate


def _option_type(kind: Any) -> Any:
    """The type of an option: where a field takes a name or a function, only the name can be given."""
    parts = typing.get_args(kind)
    return str if str in parts and any(typing.get_origin(part) is Callable for part in parts) else kind


def described_fields(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field, in lines of the form `name, name: words`; "" if nothing."""
    described = {field.name: "" for field in dataclasses.fields(kind)}
    current: list[str] = []
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        match = _DESCRIBED.fullmatch(line.strip())
        if match and set(match[1].split(", ")) <= set(described):
            current = match[1].split(", ")
            described |= dict.fromkeys(current, match[2])
        elif not line.strip():
            current = []
        else:
            described |= {name: f"{described[name]} {line.strip()}" for name in current}
    return described
