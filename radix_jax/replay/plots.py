"""Pictures of a sweep: PNG, and a page that needs no other file. matplotlib is an extra."""

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from radix_jax.replay.report import ReplayReport

_PANELS: tuple[tuple[str, Callable[[ReplayReport], float]], ...] = (
    ("prompt tokens from the cache (%)", lambda one: 100 * one.hit_rate),
    ("mean time to first token (s)", lambda one: one.ttft.mean_s),
    ("p99 time to first token (s)", lambda one: one.ttft.p99_s),
)
_COLUMNS: tuple[tuple[str, Callable[[ReplayReport], str]], ...] = (
    ("schedule", lambda one: one.schedule_policy),
    ("eviction", lambda one: one.eviction_policy),
    ("page size", lambda one: str(one.page_size)),
    ("pool tokens", lambda one: f"{one.pool_tokens:,}"),
    ("hit rate", lambda one: f"{one.hit_rate:.2%}"),
    ("optimum", lambda one: "" if one.optimal_hit_rate is None else f"{one.optimal_hit_rate:.2%}"),
    ("TTFT mean", lambda one: f"{one.ttft.mean_s:.2f} s"),
    ("TTFT p99", lambda one: f"{one.ttft.p99_s:.2f} s"),
    ("latency p50", lambda one: f"{one.latency.p50_s:.2f} s"),
    ("waiting p99", lambda one: f"{one.waiting.p99_s:.2f} s"),
    ("retractions", lambda one: str(one.num_retractions)),
    ("padding", lambda one: f"{one.padding:.1%}"),
)
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin-top:1.5rem}td,th{padding:.25rem .7rem;text-align:right}
td,th{border-bottom:1px solid #ddd;white-space:nowrap}
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}svg{max-width:100%;height:auto}div{overflow-x:auto}"""


def table_rows(reports: Sequence[ReplayReport]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of a table with a row a run."""
    return [name for name, _ in _COLUMNS], [[cell(one) for _, cell in _COLUMNS] for one in reports]


def write_png(reports: Sequence[ReplayReport], path: Path) -> None:
    """A picture of the sweep.

    Raises:
        ImportError: matplotlib is missing. OSError: the file can't be written.
    """
    _draw(reports).savefig(path, format="png", dpi=150)


def write_html(reports: Sequence[ReplayReport], path: Path) -> None:
    """A page with the picture and the table, all in one file.

    Raises:
        ImportError: matplotlib is missing. OSError: the file can't be written.
    """
    drawn = io.StringIO()
    _draw(reports).savefig(drawn, format="svg")
    svg = drawn.getvalue()
    headings, rows = table_rows(reports)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    title = html.escape(f"Replay of {reports[0].trace}")
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><div>{svg[svg.index('<svg') :]}</div>"
        f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></html>\n"
    )


def _draw(reports: Sequence[ReplayReport]) -> Any:
    """A panel for each of a few figures over the size of the pool, a line for each of the other settings."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'radix_jax[plots]'") from error
    lines: dict[str, list[ReplayReport]] = {}
    for one in reports:
        lines.setdefault(f"{one.schedule_policy}, {one.eviction_policy}, pages of {one.page_size}", []).append(one)
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_PANELS))
    markers = "osDv^<>Pp*Xh"
    for panel, (label, value_of) in zip(panels, _PANELS, strict=True):
        for place, (name, line) in enumerate(lines.items()):
            line = sorted(line, key=lambda one: one.pool_tokens)
            sizes = [one.pool_tokens / 1e6 for one in line]
            # Lines that lie on each other stay visible: the later ones are thinner, with smaller marks.
            thickness = 1 + 2 * (1 - place / len(lines))
            look = {"marker": markers[place % len(markers)], "linewidth": thickness, "markersize": 3 + 2 * thickness}
            panel.plot(sizes, [value_of(one) for one in line], label=name, alpha=0.85, **look)
        panel.set_title(label, fontsize=10)
        panel.set_xlabel("pool (million tokens)")
        panel.grid(alpha=0.3)
    _draw_optimum(panels[0], reports)
    for panel in panels:
        highest = max(max(line.get_ydata()) for line in panel.get_lines())
        panel.set_ylim(0, 1.08 * highest or 1)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 3), fontsize=9)
    figure.suptitle(f"Replay of {reports[0].trace}: {reports[0].num_requests:,} requests")
    return figure


def _draw_optimum(panel: Any, reports: Sequence[ReplayReport]) -> None:
    """What eviction with knowledge of the future would find, the best of each size of the pool."""
    best: dict[int, float] = {}
    for one in reports:
        if one.optimal_hit_rate is not None:
            best[one.pool_tokens] = max(best.get(one.pool_tokens, 0.0), 100 * one.optimal_hit_rate)
    if best:
        sizes = sorted(best)
        panel.plot([size / 1e6 for size in sizes], [best[size] for size in sizes], "k--", label="optimal eviction")
