"""What a check of a GPU found: rows by section, told as they come, kept where a killed run leaves them."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

_TABLE_WIDTH = 200


@dataclass
class Section:
    """One section's results.

    rows: what was found, in order. dropped: what did not fit its time, or could not be had, and why.
    error: what ended it early; the rows before it count.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, str]] = field(default_factory=list)
    error: str | None = None
    seconds_s: float = 0.0


class Report:
    """Sections by name, and targets that were met or not.

    limit_s: seconds from now that everything has to fit into. patience: what a section's own limit is multiplied by.
    out: file that is rewritten after each section. table: where rows are told as they come.
    """

    def __init__(
        self, limit_s: float, *, patience: float = 1.0, out: Path | None = None, table: TextIO | None = None
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.sections: dict[str, Section] = {}
        self.targets: list[dict[str, Any]] = []
        self._started_s = time.monotonic()
        self._end_s = self._started_s + limit_s
        self._section_end_s = self._end_s
        self._patience = patience
        self._current = Section()
        self._out = out
        self._table = table or sys.stderr

    @property
    def total_left_s(self) -> float:
        """Seconds left of the whole."""
        return self._end_s - time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds left of the section at hand, or of the whole if that is less."""
        return min(self._end_s, self._section_end_s) - time.monotonic()

    @contextmanager
    def section(self, name: str, limit_s: float) -> Iterator[None]:
        """What is told inside belongs to section `name`. An exception ends the section and is noted, no more."""
        self._current = self.sections.setdefault(name, Section())
        began_s = time.monotonic()
        self._section_end_s = began_s + limit_s * self._patience
        self._tell(f"== {name} ({self.total_left_s:.0f} s left)")
        try:
            yield
        except Exception as error:
            self._current.error = f"{type(error).__name__}: {error}"[:2000]
            self._tell(f"   error: {self._current.error}")
        finally:
            self._current.seconds_s += round(time.monotonic() - began_s, 3)
            self._section_end_s = self._end_s
            self.save()

    def row(self, **fields: Any) -> None:
        """One result of the section at hand."""
        self._current.rows.append(fields)
        self._tell("   " + "  ".join(f"{name} {_short(value)}" for name, value in fields.items()))

    def drop(self, what: str, why: str) -> None:
        """Something that the section at hand does not do."""
        self._current.dropped.append({"what": what, "why": why})
        self._tell(f"   dropped {what}: {why}")

    def target(self, name: str, value: float | None, at_least: float) -> None:
        """A figure that was aimed at; None: it was not measured, and so not met."""
        met = value is not None and value >= at_least
        self.targets.append({"name": name, "value": value, "at_least": at_least, "passed": met})
        self._tell(f"   target {name}: {_short(value)} of {at_least:g}, {'met' if met else 'not met'}")

    def as_dict(self) -> dict[str, Any]:
        """All of it."""
        sections = {
            name: {key: value for key, value in vars(section).items() if value not in (None, [])}
            for name, section in self.sections.items()
        }
        return {
            "benchmark": "gpu_check",
            **self.facts,
            "targets": self.targets,
            "sections": sections,
            "seconds_s": round(time.monotonic() - self._started_s, 3),
        }

    @property
    def is_right(self) -> bool:
        """No section ended by an error, and no comparison is off."""
        rows = [row for section in self.sections.values() for row in section.rows]
        return all(section.error is None for section in self.sections.values()) and all(
            row["ok"] == row.get("cases", True) for row in rows if "ok" in row
        )

    def print_tables(self) -> None:
        """The rows of each section, in columns."""
        console = Console(file=self._table, width=_TABLE_WIDTH)
        for name, section in self.sections.items():
            columns = list(dict.fromkeys(key for row in section.rows for key in row))
            table = Table(*columns, title=name)
            for row in section.rows:
                table.add_row(*(_short(row[key]) if key in row else "" for key in columns))
            if columns:
                console.print(table)

    def save(self) -> None:
        """Rewrite the file, if there is one. Nobody ever sees half of it."""
        if self._out is None:
            return
        scratch = self._out.with_name(self._out.name + ".part")
        scratch.write_text(json.dumps(self.as_dict()) + "\n")
        os.replace(scratch, self._out)

    def _tell(self, line: str) -> None:
        print(line, file=self._table, flush=True)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
