"""Plots and heat maps as SVG, without a library; the same data give the same bytes.

A page shows them as images, so each file brings its colours, for a light and for a dark page, and has no background.
An image asks the system for the theme, which need not be the page's: either set of colours can be read on either page.
Nothing is told apart by colour alone: curves have markers and dashes too, cells of a heat map have their value.
"""

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from probes.axis import Axis, axis, drawable
from probes.finding import HeatMap, Plot

WIDTH = 760  # of a plot
HEIGHT = 280  # of its frame
CHARACTER = 7.0  # width of a character of text, about
MOST_MARKED = 40  # points of a curve that are marked one by one

LIGHT = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#0a7d8c", "#9a6700", "#59636e")
DARK = ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#39c5cf", "#d29922", "#8b949e")
DASHES = ("", "8 3", "2 3", "9 3 2 3")
# Heat map: one hue, from bad to good as from pale to deep.
BAD, GOOD = (232, 241, 250), (8, 64, 129)


def plot(part: Plot) -> str:
    """Return the curves as an SVG file."""
    points = [point for series in part.series.values() for point in series]
    shown = [(x, y) for x, y in points if drawable(x, log=part.log_x) and drawable(y, log=part.log_y)]
    legend, top = _legend(list(part.series))
    body = [_text(0, 14, part.y, "start"), *legend]
    bottom = top + HEIGHT
    if shown:
        across = axis([x for x, _ in shown], log=part.log_x, tight=True)
        up = axis([y for _, y in shown], log=part.log_y, tight=False)
        left = 10 + max(_width(label) for _, label in up.ticks)
        right = WIDTH - 32.0

        def place(x: float, y: float) -> tuple[float, float]:
            return left + across.place(x) * (right - left), bottom - up.place(y) * HEIGHT

        body += _frame(across, up, left, right, bottom, place)
        for index, series in enumerate(part.series.values()):
            runs = _runs(series, set(shown))
            body += _curve(index, [[place(x, y) for x, y in run] for run in runs])
    else:
        body.append(_text(WIDTH / 2, top + HEIGHT / 2, "nothing to draw", "middle"))
    body.append(_text(WIDTH / 2, bottom + 40, part.x, "middle"))
    if missing := len(points) - len(shown):
        why = "not finite" if not (part.log_x or part.log_y) else "not finite, or not above 0 on a log axis"
        body.append(_text(0, bottom + 62, f"not drawn: {missing} of {len(points)} points, {why}", "start"))
        bottom += 22
    return _file(part.title, WIDTH, bottom + 48, body)


def _frame(
    across: Axis,
    up: Axis,
    left: float,
    right: float,
    bottom: float,
    place: Callable[[float, float], tuple[float, float]],
) -> list[str]:
    """Grid, axes and what is written on them."""
    out = []
    for value, label in up.ticks:
        _, y = place(across.low, value)
        out.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        out.append(_text(left - 8, y + 4.5, label, "end"))
    for value, label in across.ticks:
        x, _ = place(value, up.low)
        out.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f}v5"/>')
        out.append(_text(x, bottom + 20, label, "middle"))
    out.append(f'<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>')
    return out


def _runs(series: Sequence[tuple[float, float]], shown: set[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Cut a curve where a point is missing: a line across the gap would claim a value."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in series:
        if point in shown:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _curve(index: int, runs: Sequence[Sequence[tuple[float, float]]]) -> list[str]:
    out = []
    marked = sum(map(len, runs)) <= MOST_MARKED
    for run in runs:
        if len(run) > 1:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
            out.append(f'<polyline class="{_stroke(index)}" points="{points}"/>')
        if marked or len(run) == 1:
            out += [_marker(index, x, y) for x, y in run]
    return out


def _stroke(index: int) -> str:
    dash = (index + index // len(LIGHT)) % len(DASHES)  # the ninth curve has the first one's colour, and other dashes
    return f"line s{index % len(LIGHT)} d{dash}"


def _marker(index: int, x: float, y: float) -> str:
    """A circle, square, triangle or diamond; later ones are smaller, so that equal points show both."""
    r = max(2.5, 4.5 - 0.5 * index)
    start, rest = (
        ((-r, 0.0), f"a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"),
        ((-r, -r), f"h{2 * r}v{2 * r}h{-2 * r}z"),
        ((0.0, -1.2 * r), f"l{1.2 * r:.1f} {2.1 * r:.1f}h{-2.4 * r:.1f}z"),
        ((0.0, -1.3 * r), "".join(f"l{dx * 1.3 * r:.1f} {dy * 1.3 * r:.1f}" for dx, dy in ((1, 1), (-1, 1), (-1, -1)))),
    )[index % 4]
    return f'<path class="m{index % len(LIGHT)}" d="M{x + start[0]:.1f} {y + start[1]:.1f}{rest}"/>'


def _legend(names: Sequence[str]) -> tuple[list[str], float]:
    """Return the legend in rows above the frame, and where the frame begins."""
    out, x, y = [], 0.0, 36.0
    for index, name in enumerate(names):
        width = 36 + _width(name)
        if x and x + width > WIDTH:
            x, y = 0.0, y + 20
        out.append(f'<path class="{_stroke(index)}" d="M{x:.1f} {y - 4.5:.1f}h28"/>')
        out.append(_marker(index, x + 14, y - 4.5))
        out.append(_text(x + 34, y, name, "start"))
        x += width + 18
    return out, y + 18


def heat_map(part: HeatMap) -> str:
    """Return the grid as an SVG file, the values written in its cells; None leaves a cell empty."""
    wide = max(46.0, 10 + max(map(_width, part.columns)))
    high, top = 28.0, 28.0
    left = 10 + max(map(_width, part.rows))
    bottom = top + high * len(part.rows)
    right = left + wide * len(part.columns)
    body = [_text(0, 14, part.y, "start")]
    for i, (label, values) in enumerate(zip(part.rows, part.values, strict=True)):
        y = top + i * high
        body.append(_text(left - 8, y + high / 2 + 4.5, label, "end"))
        for j, value in enumerate(values):
            if value is not None:
                body += _cell(left + j * wide, y, wide, high, value)
    for j, label in enumerate(part.columns):
        body.append(_text(left + (j + 0.5) * wide, bottom + 18, label, "middle"))
    body.append(_text((left + right) / 2, bottom + 40, part.x, "middle"))
    body += [_rect(left + 14 + 14 * step, bottom + 56, 14, 12, step / 10) for step in range(11)]  # the scale
    body += [_text(left + 8, bottom + 66.5, "0", "end"), _text(left + 174, bottom + 66.5, "1", "start")]
    return _file(part.title, max(right, left + 190) + 2, bottom + 72, body)


def _cell(x: float, y: float, wide: float, high: float, value: float) -> list[str]:
    if not math.isfinite(value):
        return [_text(x + wide / 2, y + high / 2 + 4.5, str(value), "middle")]
    ink = "light" if value > 0.6 else "deep"
    written = _text(x + wide / 2 - 1, y + high / 2 + 3.5, _share(value), "middle", ink)
    return [_rect(x, y, wide - 2, high - 2, value), written]


def _rect(x: float, y: float, wide: float, high: float, value: float) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{_fill(value)}"/>'


def _fill(value: float) -> str:
    share = min(1.0, max(0.0, value))
    return "#" + "".join(f"{round(bad + share * (good - bad)):02x}" for bad, good in zip(BAD, GOOD, strict=True))


def _share(value: float) -> str:
    """Two digits, and what is not quite 0 or 1 does not look it."""
    if value in {0, 1}:
        return f"{value:.0f}"
    if 0 < value < 0.005:
        return "<.01"
    return ">.99" if 0.995 <= value < 1 else f"{value:.2f}"


def _width(text: str) -> float:
    return CHARACTER * len(text)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "text") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _style() -> str:
    """The style sheet: what both pages share, the colours of a light page, and those of a dark one."""

    def colours(text: str, grid: str, series: Sequence[str]) -> str:
        rules = [f".text{{fill:{text}}}.axis{{stroke:{text}}}.grid{{stroke:{grid}}}"]
        rules += [f".s{i}{{stroke:{colour}}}.m{i}{{fill:{colour}}}" for i, colour in enumerate(series)]
        return "".join(rules)

    dashes = "".join(f".d{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(DASHES) if dash)
    return (
        ".light{fill:#ffffff}.deep{fill:#0b2239}"  # on cells, which are the same on both pages
        "text{font:13px -apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        f".line{{fill:none;stroke-width:2}}.axis,.grid{{fill:none;stroke-width:1}}{dashes}"
        f"{colours('#59636e', '#8b949e55', LIGHT)}"
        f"@media (prefers-color-scheme:dark){{{colours('#9198a1', '#8b949e55', DARK)}}}"
    )


def _file(title: str, width: float, height: float, body: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_style()}</style>",
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
