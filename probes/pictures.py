"""Pictures of a page by matplotlib, as SVG: one style, and the same data give the same bytes.

Text stays text (small files, which can be searched and read aloud), measured in a wide font, so that it fits in others
too; the file is as large as what is drawn, so nothing is cut off. Nothing is told apart by colour alone: curves have
markers and dashes, points their names, cells of a heat map their value or marker.

Import this module where a picture is drawn, not at the top of a file: it brings matplotlib, and commands start without.
"""

import io
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from numpy import ma

from fathom.probes.finding import Bars, HeatMap, Picture, Plot, Scatter, number

Point = tuple[float, float]

COLOURS: Final = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#0a7d8c", "#9a6700", "#59636e")
DASHES: Final = ("-", (0, (6, 2)), (0, (2, 2)), (0, (7, 2, 2, 2)))
MARKERS: Final = "os^DvP*X"
INK, FAINT = "#424a53", "#d0d7de"  # text and axes; lines behind the data
PALE, DEEP = "#e8f1fa", "#084081"  # of a heat map, from 0 to 1: one hue
ON_PALE, ON_DEEP = "#0b2239", "#ffffff"  # text in its cells
MOST_MARKED: Final = 40  # points of a curve that are marked one by one
LARGEST: Final = 1e100  # beyond it (or, on a log axis, below its inverse) axes overflow: such a number is not drawn
WIDE: Final = 88  # characters below the bars of a picture
TALL: Final = 30  # rows of a heat map from which its columns are named at both ends
STYLE: Final[dict[Any, Any]] = {
    "figure.dpi": 72,  # a point is a pixel: what is measured is what is drawn
    "figure.figsize": (6.4, 3.2),  # of the frame, in inches
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a $ is a $
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "fathom",
}


def picture(part: Picture) -> str:
    """Draw a part as an SVG file on a white page."""
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user's own settings are
        mpl.rcParams.update(STYLE)
        figure = Figure()
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_title(part.title)
        match part:
            case Plot():
                _plot(axes, part)
            case Scatter():
                _scatter(axes, part)
            case Bars():
                _bars(axes, part)
            case HeatMap():
                _heat_map(axes, part)
        figure.set_canvas(canvas)
        file = io.StringIO()
        told = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # else the hour and the release are in it
        figure.savefig(file, format="svg", bbox_inches="tight", pad_inches=0.1, metadata=told | {"Title": part.title})
    return _compact(file.getvalue())


def _compact(text: str) -> str:
    """The same file without its prologue, each style that comes often written once: half the bytes."""
    text = text[text.index("<svg") :].replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(' (?:d|x|y|transform)="[^"]*"', _rounded, text)
    often = [style for style, count in Counter(re.findall(' style="([^"]*)"', text)).items() if count > 2]
    for index, style in enumerate(often):
        text = text.replace(f' style="{style}"', f' class="s{index}"')
    rules = "".join(f".s{index}{{{style}}}" for index, style in enumerate(often))
    return text.replace("</style>", f"{rules}</style>", 1)


def _rounded(attribute: re.Match[str]) -> str:
    """Places to a hundredth of a point, in one line."""
    return re.sub(r"\d+\.\d{3,}", lambda place: f"{float(place[0]):.2f}", attribute[0].replace("\n", ""))


def _plot(axes: Axes, part: Plot) -> None:
    seen = _frame(axes, part, [point for series in part.series.values() for point in series])
    for index, (name, series) in enumerate(part.series.items()):
        # a gap where a point has no place: a line across it would claim a value
        kept = [point if point in seen else (math.nan, math.nan) for point in series]
        beside = [{*kept[max(i - 1, 0) : i], *kept[i + 1 : i + 2]} for i in range(len(kept))]
        alone = [i for i, point in enumerate(kept) if point in seen and not beside[i] & seen]  # no line reaches it
        axes.plot(*_columns(kept), label=name, markevery=alone if len(kept) > MOST_MARKED else None, **_look(index))
    _legend(axes, len(part.series))


def _scatter(axes: Axes, part: Scatter) -> None:
    figure = axes.figure
    assert isinstance(figure, Figure)
    count = sum(map(len, part.points.values()))
    figure.set_size_inches(6.4, max(3.2, 0.32 * count))  # a line for each name
    seen = _frame(axes, part, [(x, y) for series in part.points.values() for _, x, y in series])
    named: list[tuple[str, Point]] = []
    for index, (name, series) in enumerate(part.points.items()):
        kept = [(label, (x, y)) for label, x, y in series if (x, y) in seen]
        axes.plot(*_columns([point for _, point in kept]), label=name, **(_look(index) | {"linestyle": "", "ms": 6}))
        named += kept
    _legend(axes, len(part.points))
    _name_points(axes, named)


# Where a name may stand beside its point: alignment, and how far right and up in points; the first free place is taken.
PLACES: Final = tuple(
    (align, x * far, y * far)
    for far, (align, x, y) in product(
        (8, 13, 20, 30, 42, 56, 74, 96),
        (
            *(("left", 1.0, 0.0), ("right", -1.0, 0.0), ("center", 0.0, 1.0), ("center", 0.0, -1.0)),
            *(("left", 0.8, 0.8), ("right", -0.8, 0.8), ("left", 0.8, -0.8), ("right", -0.8, -0.8)),
            *(("left", 0.4, 1.0), ("right", -0.4, 1.0), ("left", 0.4, -1.0), ("right", -0.4, -1.0)),
        ),
    )
)
BESIDE: Final = 10  # points; a name that is further away has a line to its point
LINE: Final = {"arrowstyle": "-", "color": INK, "linewidth": 0.4, "shrinkB": 3}


def _name_points(axes: Axes, named: Sequence[tuple[str, Point]]) -> None:
    """Write each name where it covers neither another nor a point."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    ruler = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]  # measures text
    axes.margins(0.1)
    axes.autoscale_view()  # else points are placed by limits that are not those of the picture
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in axes.transData.transform([point for _, point in named])]
    for name, point in named:
        tried: list[tuple[float, Annotation, Bbox]] = []
        for align, x, y in PLACES:
            line = LINE if math.hypot(x, y) > BESIDE else None
            label = axes.annotate(
                name, point, (x, y), textcoords="offset points", ha=align, va="center", fontsize=7.5, arrowprops=line
            )
            label.update_positions(ruler)
            box = Text.get_window_extent(label, ruler)  # without its line
            label.set_visible(False)
            tried.append((_covered(box, taken, axes.bbox), label, box))
            if tried[-1][0] == 0:
                break
        _, best, box = min(tried, key=lambda one: one[0])
        for _, label, _ in tried:
            if label is not best:
                label.remove()
        best.set_visible(True)
        taken.append(box)


def _covered(box: Bbox, taken: Sequence[Bbox], frame: Bbox) -> float:
    """Square points of a name that lie on others, or outside of the frame."""
    both = (Bbox.intersection(box, other) for other in taken)
    inside = Bbox.intersection(box, frame)
    area = box.width * box.height
    outside = area - (0.0 if inside is None else inside.width * inside.height)
    return round(outside + sum(part.width * part.height for part in both if part is not None), 6)


def _bars(axes: Axes, part: Bars) -> None:
    places, tops = range(len(part.groups)), [0.0] * len(part.groups)
    sums = [sum(values) for values in zip(*part.series.values(), strict=True)]
    handles: list[Any] = []
    for index, (name, values) in enumerate(part.series.items()):
        colour, hatch = COLOURS[index % len(COLOURS)], "///" * (index // len(COLOURS))
        heights = [value if math.isfinite(value) else 0.0 for value in values]
        drawn = axes.bar(
            places, heights, 0.62, tops, color=colour, hatch=hatch, edgecolor=ON_DEEP, linewidth=0, label=name
        )
        handles.append(drawn)
        tops = [low + value for low, value in zip(tops, heights, strict=True)]
    ends = tops
    if part.spread is not None:
        ends = [high for _, high in part.spread]
        reach = [(value - low, high - value) for value, (low, high) in zip(tops, part.spread, strict=True)]
        axes.errorbar(places, tops, yerr=[*zip(*reach, strict=True)], fmt="none", ecolor=INK, elinewidth=1, capsize=4)
    for place, end, value in zip(places, ends, sums, strict=True):
        axes.annotate(number(value), (place, end), (0, 3), textcoords="offset points", ha="center", fontsize=7.5)
    for index, (name, value) in enumerate(part.limits.items(), 1):
        handles.append(axes.axhline(value, color=INK, linestyle=DASHES[index % len(DASHES)], label=name))
    axes.set_ylabel(part.y)
    names, slanted = _broken(part.groups)
    angle: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axes.set_xticks([*places], names, **angle)
    if part.log_y:
        _log_axis(axes, "y", [value for value in (*ends, *tops, *part.limits.values()) if value > 0] or [1.0])
    else:
        axes.set_ylim(0, 1.12 * max(*ends, *part.limits.values(), 1 / LARGEST))
    if len(handles) > 1:
        _legend(axes, len(handles), handles[::-1])  # the uppermost first


def _broken(names: Sequence[str]) -> tuple[list[str], bool]:
    """Names side by side below an axis, in lines that are broken after a colon first; and whether they are slanted."""
    width = WIDE // len(names)
    if max(map(len, names)) <= width:
        return list(names), False
    broken = [
        "\n".join(textwrap.fill(line, width, break_long_words=False) for line in re.split("(?<=:) ", name))
        for name in names
    ]
    fits = all(len(line) <= width for name in broken for line in name.splitlines())
    return (broken, False) if fits else (list(names), True)


def _heat_map(axes: Axes, part: HeatMap) -> None:
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.set_size_inches(max((0.3 if part.kinds else 0.42) * len(part.columns), 1.5), max(0.24 * len(part.rows), 0.5))
    axes.set(xlim=(0, len(part.columns)), ylim=(len(part.rows), 0), xlabel=part.x, ylabel=part.y)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    upright = 90 if max(map(len, part.columns)) > 5 else 0
    axes.set_xticks([j + 0.5 for j in range(len(part.columns))], part.columns, rotation=upright)
    axes.set_yticks([i + 0.5 for i in range(len(part.rows))], part.rows)
    axes.tick_params(length=0, labeltop=len(part.rows) > TALL)
    (_marks if part.kinds else _cells)(axes, part)


def _cells(axes: Axes, part: HeatMap) -> None:
    """Cells as deep as their values, which stand in them."""
    known = [[math.nan if value is None or math.isinf(value) else value for value in row] for row in part.values]
    colours = LinearSegmentedColormap.from_list("from pale to deep", (PALE, DEEP))
    axes.pcolormesh(ma.masked_invalid(known), cmap=colours, vmin=0, vmax=1, edgecolors=ON_DEEP, linewidth=1)
    for (i, row), j in product(enumerate(part.values), range(len(part.columns))):
        if (value := row[j]) is not None:
            ink = INK if not math.isfinite(value) else ON_DEEP if value > 0.6 else ON_PALE
            axes.text(j + 0.5, i + 0.5, _share(value), ha="center", va="center_baseline", fontsize=7, color=ink)


def _share(value: float) -> str:
    """Two digits, and what is not quite 0 or 1 does not look it."""
    if value in {0, 1} or not math.isfinite(value):
        return f"{value:.0f}"
    if 0 < value < 0.005:
        return "<.01"
    return ">.99" if 0.995 <= value < 1 else f"{value:.2f}"


def _marks(axes: Axes, part: HeatMap) -> None:
    """A marker for each kind of cell."""
    for index, (kind, marker, meaning) in enumerate(part.kinds):
        cells = [
            (j + 0.5, i + 0.5) for i, row in enumerate(part.values) for j, value in enumerate(row) if value == kind
        ]
        colour = COLOURS[-1] if marker in {".", "_"} else COLOURS[index]  # what is no news is grey
        axes.plot(*_columns(cells), linestyle="", marker=marker, markersize=6, color=colour, label=meaning)
    axes.hlines(range(len(part.rows) + 1), 0, len(part.columns), color=FAINT, linewidth=0.4, zorder=0)
    _legend(axes, len(part.kinds))


def _look(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of a series; the ninth has the first one's colour, and others of the rest."""
    turn = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index + turn) % len(DASHES)],
        "marker": MARKERS[(index + turn) % len(MARKERS)],
    }


def _legend(axes: Axes, series: int, handles: Sequence[Artist] | None = None) -> None:
    """Name the series beside the frame, where they cover nothing."""
    if series > 1:
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.02))


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _frame(axes: Axes, part: Plot | Scatter, points: Sequence[Point]) -> set[Point]:
    """Name and scale the axes; returns the points that have a place on them, and writes how many have not."""
    seen = {(x, y) for x, y in points if _drawable(x, log=part.log_x) and _drawable(y, log=part.log_y)}
    axes.set(xlabel=part.x, ylabel=part.y)
    if seen:
        across, up = _columns(sorted(seen))
        (_log_axis if part.log_x else _linear_axis)(axes, "x", across)
        (_log_axis if part.log_y else _linear_axis)(axes, "y", up)
    else:
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
    if missing := sum(point not in seen for point in points):
        why = "not finite" if not (part.log_x or part.log_y) else "not finite, or not above 0 on a log axis"
        text = f"not drawn: {missing} of {len(points)} points, {why}"
        axes.annotate(text, (0, 0), (0, -44), "axes fraction", "offset points", fontsize=7.5)
    return seen


def _drawable(value: float, *, log: bool) -> bool:
    return abs(value) < LARGEST and (not log or value > 1 / LARGEST)


def _linear_axis(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    whole = all(value == int(value) for value in values)
    locator = MaxNLocator(7, steps=[1, 2, 5, 10], integer=whole)
    _ticks(axes, which, locator, "{:,.0f}".format if whole else None)
    low, high = min(values), max(values)
    if which == "y" and 0 < low < high / 2:
        axes.set_ylim(0, 1.05 * high)  # heights are in the ratio of the values


def _log_axis(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = min(values), max(values)
    if all(math.frexp(value)[0] == 0.5 for value in values):  # powers of two: lengths of prompts and the like
        first, last = round(math.log2(low)), round(math.log2(high))
        powers = range(first, last + 1, -(-max(last - first, 1) // 10))
        _ticks(axes, which, FixedLocator([2.0**power for power in powers]), _power_of_two)
    elif high < 2 * low:
        _ticks(axes, which, MaxNLocator(6), "{:g}".format)
    else:
        digits = (1,) if high > 100 * low else (1, 2, 5) if high > 10 * low else tuple(range(1, 10))
        _ticks(axes, which, LogLocator(10, subs=digits, numticks=12), "{:g}".format)


def _ticks(axes: Axes, which: Literal["x", "y"], locator: Locator, text: Callable[[float], str] | None) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    if text is not None:
        axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _power_of_two(value: float) -> str:
    """8192 as 8K."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= unit:
            return f"{value / unit:.0f}{name}"
    return f"{value:g}"
