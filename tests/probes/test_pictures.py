import math
import re
import subprocess
import sys
from itertools import combinations, product
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fathom.probes.finding import Bars, HeatMap, Plot, Scatter
from fathom.probes.pictures import COLOURS, _look, _plot, _scatter, picture

SVG = "{http://www.w3.org/2000/svg}"
GRID = HeatMap(
    "Needles", "tokens", "depth", ("256", "512", "1024"), ("start", "end"), [[1, 0.996, None], [0.004, 0, math.nan]]
)
KINDS = HeatMap(
    "Faults", "probe", "fault", ("a", "b"), ("f",), [[1, 0]], kinds=((1, "o", "caught"), (0, ".", "passed"))
)
BARS = Bars("Plan", "GB", ("8K", "1M"), {"weights": (110, 110), "caches": (1, 11)}, limits={"a GPU": 180})
CLOUD = Scatter("Variants", "bytes", "KL", {"shard": [(f"b{i}", 100 + i // 4, 0.1) for i in range(12)]}, log_y=True)


def texts(part):
    """What is written in a picture, after a look that none of it begins outside the file."""
    root = ET.fromstring(picture(part))
    _, _, width, height = map(float, root.get("viewBox").split())
    assert root.tag == f"{SVG}svg"
    for element in root.iter(f"{SVG}text"):
        moved = re.findall(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
        x, y = map(float, moved[0] if moved else map(element.get, "xy"))
        assert 0 <= x <= width, element.text
        assert 0 <= y <= height, element.text
    return [element.text for element in root.iter(f"{SVG}text")]


def line(points, **flags):
    return Plot("Curve", "across", "up", {"one": points}, **flags)


@pytest.mark.parametrize(
    ("points", "flags", "ticks"),
    [
        ([(0, 0), (6, 1)], {}, ["0", "1", "2", "3", "4", "5", "6"]),  # layers
        ([(256.0, 0), (4096.0, 1), (1 << 20, 1)], {"log_x": True}, ["256", "4K", "1M"]),
        ([(1e-6, 0), (1e-3, 1)], {"log_x": True}, ["1e-06", "1e-05", "0.0001", "0.001"]),
        ([(3, 0), (70, 1)], {"log_x": True}, ["5", "10", "20", "50"]),
        ([(0.9871, 0), (0.9999, 1)], {}, ["0.990", "1.000"]),
        ([(0, 0), (2e6, 1)], {}, ["500,000", "2,000,000"]),
        ([(1, 1)], {}, ["1"]),  # a constant has an axis too
    ],
)
def test_ticks_are_numbers_that_one_would_write(points, flags, ticks):
    written = texts(line(points, **flags))
    assert {"Curve", "across", "up", *ticks} <= {*written}
    assert len(written) < 28


def axes_of(part):
    axes = Figure(dpi=72).add_axes((0, 0, 1, 1))
    (_plot if isinstance(part, Plot) else _scatter)(axes, part)
    return axes


def test_what_has_no_place_is_left_out_and_told():
    points = [(1, 0.1), (2, 0.2), (3, math.nan), (4, 0), (5, 0.5), (6, 1.0)]
    assert "not drawn: 2 of 6 points, not finite, or not above 0 on a log axis" in texts(line(points, log_y=True))
    [curve] = axes_of(line(points, log_y=True)).lines
    assert [math.isnan(x) for x in curve.get_xdata()] == [False, False, True, True, False, False], "a gap"
    for part in (line([(0, math.inf)]), line([(1e300, 1)]), Plot("None", "x", "y", {}), Scatter("None", "x", "y", {})):
        assert "nothing to draw" in texts(part)
    assert "nan" in texts(Bars("B", "x", ("a", "b"), {"s": (1, math.nan)}))


def test_a_lone_point_is_seen():
    """Long curves have no markers, except where no line reaches a point."""
    many = [(x, x % 7 or math.nan) for x in range(200)]
    marked = [axes_of(line(points)).lines[0].get_markevery() for points in (many[:30], many, [*many[:197], (197, 1)])]
    assert marked == [None, [], [197]]


def test_curves_are_told_apart_without_colour():
    looks = [_look(index) for index in range(16)]
    assert len({tuple(look.values()) for look in looks}) == 16
    assert len({(look["linestyle"], look["marker"]) for look in looks[:8]}) == 8
    assert looks[0]["color"] == looks[8]["color"] == COLOURS[0]
    names = {f"a rather long name of a curve, number {i}" for i in range(17)}
    assert names <= {*texts(Plot("Curves", "x", "y", {name: [(0, 0), (1, 1)] for name in names}))}


def test_cells_hold_their_values_and_nothing_rounds_to_perfect():
    assert [text for text in texts(GRID) if text[0] in "01<>n"] == ["1024", "1", ">.99", "<.01", "0", "nan"]
    assert texts(KINDS)[-2:] == ["caught", "passed"]


def test_names_of_points_cover_neither_another_nor_a_point():
    axes = axes_of(CLOUD)
    ruler = FigureCanvasAgg(axes.figure).get_renderer()
    names = [text.get_window_extent(ruler) for text in axes.texts]
    dots = [Bbox.from_bounds(x - 2, y - 2, 4, 4) for x, y in axes.transData.transform(axes.lines[0].get_xydata())]
    assert [text.get_text() for text in axes.texts] == [f"b{i}" for i in range(12)]
    assert not any(one.overlaps(other) for one, other in [*combinations(names, 2), *product(names, dots)])


def test_bars_show_their_sums_and_limits():
    assert {"Plan", "GB", "8K", "1M", "111", "121", "weights", "caches", "a GPU"} <= {*texts(BARS)}
    one = Bars("Speed", "times", ("load",), {"ratio": (61,)}, spread=[(55, 70)], limits={"as fast": 1}, log_y=True)
    assert {"61", "ratio", "as fast", "50"} <= {*texts(one)}
    with pytest.raises(AssertionError, match="stacks have no spread"):
        Bars("Plan", "GB", ("8K",), {"a": (1,), "b": (2,)}, spread=[(1, 2)])


def test_text_is_escaped_and_no_formula():
    name = 'e < (t + 1) & "so on" </text> $x^2$'
    written = texts(Plot(name, name, name, {name: [(0, 0), (1, 1)], "other": [(0, 1)]}))
    assert written.count(name) == 4
    assert texts(HeatMap(name, name, name, (name,), (name,), [[0.5]])).count(name) == 5


PARTS = (line([(0, 0.1), (1, 0.3)]), GRID, KINDS, BARS, CLOUD)


def test_the_same_data_give_the_same_bytes_whatever_the_settings():
    drawn = [picture(part) for part in PARTS]
    with mpl.rc_context({"font.size": 20, "axes.grid": False, "svg.hashsalt": "other"}):
        assert [picture(part) for part in PARTS] == drawn
        assert mpl.rcParams["font.size"] == 20, "left as it was"
    code = "import sys; from tests.probes.test_pictures import *; [sys.stdout.write(picture(part)) for part in PARTS]"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert again.stdout == "".join(drawn)
    assert "dc:date" not in "".join(drawn)


def test_commands_start_without_matplotlib():
    code = "import sys, fathom.probes.report, fathom.scripts.parts.judging; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
