"""The rows of the tree's benchmark as one picture: bars of how many times ours each figure is."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.tree_measures import Row
from benchmarks.tree_peers import OurTree

FORMATS = (".svg", ".png")
_BAR_HEIGHT = 0.26  # inches
_DPI = 150


def check_plot(path: Path) -> None:
    """Whether `plot_rows` could draw to `path`, to be asked before a long run.

    Raises:
        ValueError: the name ends in neither .svg nor .png, or its folder is missing. ImportError: no matplotlib.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"a plot is {' or '.join(FORMATS)}, not {path.suffix or 'without a suffix'!r}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise ImportError("plots need matplotlib; pip install 'radix_jax[plots]'") from error


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar for each row and cache, on a logarithmic scale on which 1 is our tree.

    Raises:
        ValueError, ImportError: as `check_plot`.
    """
    check_plot(path)
    names = [name for name in dict.fromkeys(name for row in rows for name in row.values) if name != OurTree.name]
    num_bars = sum(len(row.values) for row in rows)  # the bar of ours is the gap between two rows
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 1.2 + _BAR_HEIGHT * num_bars), layout="constrained")
    axes = figure.subplots()
    ticks: dict[float, str] = {}
    top = 0
    for row in rows:
        drawn = [name for name in names if name in row.values]
        for y, name in enumerate(drawn, top):
            times = row.times_ours[name]
            axes.barh(y, times - 1, left=1, height=0.9, color=f"C{names.index(name)}")
            axes.text(max(times, 1) * 1.04, y, f"{times:,.1f}x", fontsize=8, va="center")
        ticks[top + (len(drawn) - 1) / 2] = f"{row.name}\nours: {row.values[OurTree.name]:,.1f} {row.unit}"
        top += len(drawn) + 1
    shown = [times for row in rows for times in row.times_ours.values()]
    axes.set_xscale("log")
    axes.set_xlim(min(0.8, *shown) / 1.1, max(1.5, *shown) * 2)
    axes.set_ylim(top - 1, -1)
    axes.xaxis.set_major_formatter("{x:,g}x")
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_xlabel(f"times {OurTree.name}'s figure: a longer bar is slower, or takes more memory", fontsize=9)
    axes.axvline(1, color="black", linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
    patch = import_module("matplotlib.patches").Patch
    legend = [patch(color=f"C{place}", label=name) for place, name in enumerate(names)]
    figure.legend(handles=legend, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=_DPI)
