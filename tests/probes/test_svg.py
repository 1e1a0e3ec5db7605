import math
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.axis import LARGEST, axis, drawable
from probes.finding import HeatMap, Plot
from probes.svg import DARK, LIGHT, heat_map, plot

SVG = "{http://www.w3.org/2000/svg}"
GRID = HeatMap(
    "Needles", "tokens", "depth", ("256", "512", "1024"), ("start", "end"), [[1, 0.996, None], [0.004, 0, 0.5]]
)


def parsed(text):
    root = ET.fromstring(text)
    _, _, width, height = map(float, root.get("viewBox").split())
    assert root.tag == f"{SVG}svg"
    assert (root.get("width"), root.get("height")) == (f"{width:.0f}", f"{height:.0f}")
    for element in root.iter():
        for name, limit in (("x", width), ("y", height)):
            if element.get(name) is not None:
                assert 0 <= float(element.get(name)) <= limit, ET.tostring(element)
    return root


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def curves(root):
    """Points of every polyline, and the class that says whose it is."""
    return [
        (line.get("class"), [tuple(map(float, point.split(","))) for point in line.get("points").split()])
        for line in root.iter(f"{SVG}polyline")
    ]


def markers(root):
    return [path for path in root.iter(f"{SVG}path") if path.get("class").startswith("m")]


def line(points, **flags):
    return Plot("Curve", "x", "y", {"one": points}, **flags)


def test_points_lie_where_the_axes_say():
    root = parsed(plot(line([(256, 0.5), (1024, 0.75), (16384, 1)], log_x=True)))
    at = {element.text: float(element.get("x")) for element in root.iter(f"{SVG}text")}
    up = {element.text: float(element.get("y")) - 4.5 for element in root.iter(f"{SVG}text")}
    [(_, points)] = curves(root)
    for (x, y), across, height in zip(points, ("256", "1024", "16384"), ("0.5", "", "1.0"), strict=True):
        assert x == pytest.approx(at[across], abs=0.1)
        assert not height or y == pytest.approx(up[height], abs=0.1)
    step = (points[2][0] - points[0][0]) / 6  # 256 to 16384 are 6 doublings
    assert points[1][0] - points[0][0] == pytest.approx(2 * step, abs=0.2)


def test_ticks_are_numbers_that_one_would_write():
    def labels(values, *, log=False, tight=False):
        return [label for _, label in axis(values, log=log, tight=tight).ticks]

    assert labels([0.9871, 0.9999]) == ["0.985", "0.990", "0.995", "1.000"]
    assert labels([0, 6], tight=True) == ["0", "1", "2", "3", "4", "5", "6"], "layers"
    assert labels([0, 2e6]) == ["0", "500000", "1000000", "1500000", "2000000"]
    assert labels([-0.3, 0.3]) == ["-0.4", "-0.2", "0", "0.2", "0.4"]
    assert labels([1, 1]) == ["0", "1"], "a constant has an axis too"
    assert labels([256.0, 512.0, 4096.0], log=True, tight=True) == ["256", "512", "1024", "2048", "4096"]
    assert labels([3e-7, 2e-3], log=True) == ["10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²"]
    assert labels([3, 70], log=True) == ["2", "5", "10", "20", "50", "100"]
    assert labels([1.1, 1.9], log=True) == ["1.0", "1.2", "1.4", "1.6", "1.8", "2.0"]
    assert labels([1e-30, 1e30], log=True) == [
        f"10{k}" for k in ("⁻³⁰", "⁻²²", "⁻¹⁴", "⁻⁶", "²", "¹⁰", "¹⁸", "²⁶", "³⁴")
    ]


@given(
    st.lists(st.floats(), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_every_axis_holds_its_values_and_has_readable_ticks(values, log, tight):
    values = [value for value in values if drawable(value, log=log) and (value == 0 or abs(value) > 1 / LARGEST)] or [
        1.0
    ]
    found = axis(values, log=log, tight=tight)
    assert all(-1e-9 <= found.place(value) <= 1 + 1e-9 for value in values)
    assert all(-1e-9 <= found.place(value) <= 1 + 1e-9 for value, _ in found.ticks)
    labels = [label for _, label in found.ticks]
    assert len(set(labels)) == len(labels) <= 14
    assert labels
    assert max(map(len, labels)) <= 17


def test_what_has_no_place_is_left_out_and_told():
    points = [(1, 0.1), (2, 0.2), (3, math.nan), (4, 0), (5, 0.5), (6, 1.0)]
    root = parsed(plot(line(points, log_y=True)))
    assert [len(run) for _, run in curves(root)] == [2, 2], "no line across the gap"
    assert "not drawn: 2 of 6 points, not finite, or not above 0 on a log axis" in texts(root)
    assert "nothing to draw" in texts(parsed(plot(line([(0, math.inf)]))))
    assert "nothing to draw" in texts(parsed(plot(Plot("None", "x", "y", {}))))


def test_a_lone_point_is_seen():
    many = [(x, x % 7 or math.nan) for x in range(200)]
    assert len(markers(parsed(plot(line(many))))) == 1, "the legend's"
    assert len(markers(parsed(plot(line([(1, 1), (2, math.nan), (3, 1)]))))) == 3
    assert len(markers(parsed(plot(line([*many, (200, math.nan), (201, 3), (202, math.nan)]))))) == 2


def test_curves_are_told_apart_without_colour():
    root = parsed(plot(Plot("Layers", "x", "y", {f"layer {i}": [(0, i), (1, i)] for i in range(12)})))
    kinds = [kind for kind, _ in curves(root)]
    assert len(set(kinds)) == 12
    assert kinds[0].split()[1] == kinds[8].split()[1], "colours come again"
    assert kinds[0].split()[2] != kinds[8].split()[2], "but with other dashes"
    assert [text for text in texts(root) if text.startswith("layer")] == [f"layer {i}" for i in range(12)]


def test_the_legend_is_above_the_data():
    names = [f"a rather long name of a curve, number {i}" for i in range(9)]
    root = parsed(plot(Plot("Curves", "x", "y", {name: [(0, 0), (1, 1)] for name in names})))
    lowest = max(float(element.get("y")) for element in root.iter(f"{SVG}text") if element.text in names)
    assert lowest < min(y for _, points in curves(root) for _, y in points)


def test_cells_hold_their_values_and_nothing_rounds_to_perfect():
    root = parsed(heat_map(GRID))
    assert [text for text in texts(root) if text[0] in "01<>"] == [
        *["1", ">.99", "<.01", "0", "0.50"],
        "1024",
        *["0", "1"],  # the scale
    ]
    assert len(list(root.iter(f"{SVG}rect"))) == 5 + 11, "an empty cell is not drawn"
    assert "nan" in texts(parsed(heat_map(HeatMap("h", "x", "y", ("a",), ("b",), [[math.nan]]))))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_cells_differ_in_lightness_and_their_text_can_be_read():
    values = [i / 20 for i in range(21)]
    root = parsed(heat_map(HeatMap("h", "x", "y", tuple(map(str, range(21))), ("r",), [values])))
    fills = [rect.get("fill") for rect in root.iter(f"{SVG}rect")][:21]
    inks = [text.get("class") for text in root.iter(f"{SVG}text") if text.get("class") != "text"]
    assert [luminance(fill) for fill in fills] == sorted(map(luminance, fills), reverse=True)
    for fill, ink in zip(fills, inks, strict=True):
        assert contrast(fill, {"light": "#ffffff", "deep": "#0b2239"}[ink]) > 4, (fill, ink)


def test_both_themes_can_be_read_on_both_pages():
    text = plot(line([(0, 0), (1, 1)]))
    light, dark = text.split("@media (prefers-color-scheme:dark)")
    assert all(colour in light for colour in LIGHT)
    assert all(colour in dark for colour in DARK)
    for own, other, colours in (("#ffffff", "#0d1117", LIGHT), ("#0d1117", "#ffffff", DARK)):
        for colour in (*colours, "#59636e" if colours is LIGHT else "#9198a1"):
            assert contrast(colour, own) > 4.5, colour
            assert contrast(colour, other) > 1.9, colour  # the system's theme is not the page's: still to be seen
    assert "background" not in text


def test_text_is_escaped():
    name = 'e < (t + 1) & "so on" </text>'
    root = parsed(plot(Plot(name, name, name, {name: [(0, 0), (1, 1)]})))
    assert texts(root).count(name) == 3
    assert root.find(f"{SVG}title").text == name
    assert texts(parsed(heat_map(HeatMap(name, name, name, (name,), (name,), [[0.5]])))).count(name) == 4


def test_the_same_data_give_the_same_bytes():
    drawn = [plot(line([(0, 0.1), (1, 0.3)])) + heat_map(GRID) for _ in range(2)]
    assert drawn[0] == drawn[1]
