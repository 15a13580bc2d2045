"""Options of a command line made from a dataclass: names, types, defaults and words are the dataclass's own."""

import dataclasses
from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from radix_jax.cli_options import described_fields, with_fields
from radix_jax.config import EngineConfig


@dataclass(frozen=True)
class Settings:
    """Settings of a kettle.

    water: litres; half
        a litre is two cups.
    lid, light: closed, or lit: True or False.
    name: of the kettle.
    Note: no field is called so.

    Raises:
        ValueError: more water than the kettle holds.
    """

    water: float = 0.5
    lid: bool = True
    light: bool = False
    name: str | None = None
    bare: int = 3

    def __post_init__(self) -> None:
        if self.water > 2:
            raise ValueError(f"water={self.water} exceeds 2")


def kettle(*names: str, **defaults: object) -> tuple[typer.Typer, list[tuple[str, Settings]]]:
    """A command line that collects what its command is called with."""
    app = typer.Typer(rich_markup_mode=None)
    calls: list[tuple[str, Settings]] = []

    @app.command()
    @with_fields("settings", Settings, names or None, **defaults)
    def boil(place: str, settings: Settings) -> None:
        """Boil water."""
        calls.append((place, settings))

    return app, calls


def test_without_options_the_defaults_hold() -> None:
    app, calls = kettle()
    assert CliRunner().invoke(app, ["kitchen"]).exit_code == 0
    assert calls == [("kitchen", Settings())]


def test_each_field_is_an_option() -> None:
    app, calls = kettle()
    arguments = ["--water", "1.5", "--no-lid", "--light", "--name", "K", "--bare", "4", "kitchen"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert calls == [("kitchen", Settings(1.5, False, True, "K", 4))]


def test_some_fields_with_other_defaults() -> None:
    app, calls = kettle("water", "name", name="Emma")
    assert CliRunner().invoke(app, ["kitchen"]).exit_code == 0
    assert calls == [("kitchen", Settings(name="Emma"))]
    assert CliRunner().invoke(app, ["--bare", "4", "kitchen"]).exit_code == 2


def test_a_value_of_the_wrong_type_is_a_usage_error() -> None:
    app, calls = kettle()
    assert CliRunner().invoke(app, ["--water", "much", "kitchen"]).exit_code == 2
    assert calls == []


def test_the_dataclass_checks_the_values() -> None:
    app, calls = kettle()
    with pytest.raises(ValueError, match=r"water=3\.0 exceeds 2"):
        CliRunner().invoke(app, ["--water", "3", "kitchen"], catch_exceptions=False)
    assert calls == []


def test_words_come_from_the_docstring() -> None:
    assert described_fields(Settings) == {
        "water": "litres; half a litre is two cups.",
        "lid": "closed, or lit: True or False.",
        "light": "closed, or lit: True or False.",
        "name": "of the kettle. Note: no field is called so.",
        "bare": "",
    }
    shown = " ".join(CliRunner().invoke(kettle()[0], ["--help"]).output.split())
    assert "Boil water." in shown
    assert "litres; half a litre is two cups." in shown


def test_every_engine_setting_is_described() -> None:
    described = described_fields(EngineConfig)
    assert list(described) == [field.name for field in dataclasses.fields(EngineConfig)]
    assert all(described.values())
