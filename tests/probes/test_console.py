import io
from dataclasses import replace

import pytest
from rich.console import Console

from fathom.probes import console as shown
from fathom.probes.finding import broken
from fathom.probes.subject import Subject
from tests.fake_probes import FAILING, FAKES, GOOD, HOLLOW, PASSING, TRIPPING, run_fake


def printed(renderable, *, terminal=True, **flags):
    """What a console of 120 columns shows, without colours unless `flags` ask for them."""
    flags = {"color_system": None} | flags
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal, **flags)
    console.print(renderable)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def runs():
    return {probe.name: replace(run_fake(probe, Subject()), seconds=12.34) for probe in FAKES}


def test_a_terminal_shows_findings_worst_first_and_the_summary_last(runs):
    text = printed(shown.findings(runs["failing"]))
    lines = [line for line in text.splitlines() if line.strip()]
    assert lines[0] == "failing: Does failing hold?"
    assert [line.split("│")[5].strip() for line in lines if line.startswith("│")] == ["fail", "fail", "vacuous", "pass"]
    assert "fail: layer 2, recall, worst row: 0.42, want >= 0.99\n    position: 4511; missing entries: 7, 8\n" in text
    assert lines[-1] == "Fail: 2 of 4 findings failed, 1 more vacuous. Mean recall is 0.997 over 2 layers."


def test_verdicts_are_words_and_colours(runs):
    coloured = printed(shown.findings(runs["failing"]), color_system="standard")
    for word, code in (("fail", "1;31"), ("vacuous", "1;33"), ("pass", "32")):
        assert f"\x1b[{code}m{word}" in coloured
    assert "\x1b" not in printed(shown.findings(runs["failing"]))


def test_what_a_probe_says_is_no_markup():
    finding = replace(GOOD, what="recall [bold]of[/bold] [t, k] [/]")
    run = run_fake(replace(PASSING, findings=(finding,), summary="See [red]this[/red] [/]."), Subject())
    text = printed(shown.findings(run))
    assert "recall [bold]of[/bold] [t, k] [/]" in text
    assert "See [red]this[/red] [/]." in text
    assert "See [red]this[/red] [/]." in printed(shown.closing([run]))
    failing = run_fake(replace(PASSING, findings=(broken("shape [t, k] [/]", "[bold]no[/bold]"),)), Subject())
    text = printed(shown.findings(failing))
    assert "fail: shape [t, k] [/]" in text
    assert "why: [bold]no[/bold]" in text


def plain_lines(run):
    return [line.plain for line in shown.lines(run)]


def test_a_run_in_one_line_and_its_failures(runs):
    [line] = plain_lines(runs["passing"])
    assert line == "pass     passing           1 finding    12.3 s  Mean recall is 0.997 over 2 layers."
    assert plain_lines(runs["failing"]) == [
        "fail     failing          4 findings    12.3 s  Mean recall is 0.997 over 2 layers.",
        "    fail: layer 2, recall, worst row: 0.42, want >= 0.99",
        "        position: 4511; missing entries: 7, 8",
        "    fail: census",
        "        why: no tensor",
        "    vacuous: recall at 64",
        "        why: 16 entries, top-k 32",
    ]
    assert plain_lines(runs["hollow"])[0].startswith("vacuous  hollow ")
    assert "tripwire at logits" in plain_lines(runs["tripping"])[1]
    assert plain_lines(runs["unjudged"])[1].startswith("    Fail: nothing was judged")
    [line] = plain_lines(run_fake(replace(PASSING, summary="In two\nlines."), Subject()))
    assert line.endswith("In two lines.")


def test_all_failures_in_a_line_each(runs):
    assert [line.plain for line in shown.failures(list(runs.values()))] == [
        "failing: fail: layer 2, recall, worst row: 0.42, want >= 0.99",
        "failing: fail: census",
        "failing: vacuous: recall at 64",
        "hollow: vacuous: Does hollow hold?",
        "partly-hollow: vacuous: recall at 64",
        "tripping: fail: layer 3, tripwire at logits",
        "unjudged: Fail: nothing was judged, and a probe that cannot fail shows nothing",
    ]


def test_control_characters_are_escaped():
    failing = run_fake(replace(PASSING, findings=(broken("a\x1b[31m\x07 name", "an\x9b end"),)), Subject())
    for text in ("\n".join(plain_lines(failing)), printed(shown.findings(failing))):
        assert r"a\x1b[31m\x07 name" in text
        assert r"an\x9b end" in text
        assert not {"\x1b", "\x07", "\x9b"} & {*text}


def test_the_closing_table_has_a_row_for_each_probe(runs):
    text = printed(shown.closing(list(runs.values())))
    rows = [[cell.strip() for cell in line.split("│")[1:5]] for line in text.splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows if row[0]] == [
        ["passing", "pass", "12.3"],
        ["failing", "fail", "12.3"],
        ["hollow", "vacuous", "12.3"],
        ["partly-hollow", "vacuous", "12.3"],
        ["tripping", "fail", "12.3"],
        ["unjudged", "fail", "12.3"],
    ]
    told = " ".join(f"word-{i}" for i in range(100))
    text = printed(shown.closing([run_fake(replace(PASSING, summary=told), Subject())]))
    rows = [line.split("│")[4].strip() for line in text.splitlines() if line.startswith("│")]
    assert " ".join(rows) == told, "nothing is cut"


def test_the_total_names_what_did_not_pass(runs):
    assert shown.total([runs["passing"]]) == "1 of 1 probes passed in 12.3 s"
    told = shown.total([runs[probe.name] for probe in (PASSING, FAILING, HOLLOW, TRIPPING)])
    assert told == "1 of 4 probes passed in 49.4 s; not: failing (fail), hollow (vacuous), tripping (fail)"


def test_progress_is_drawn_on_a_terminal_and_gone_afterwards():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with shown.watched(console, PASSING, 3, 14) as progress:
        progress(0.25, "layer [7] of 9")
    text = console.file.getvalue()
    assert "3/14 passing" in text
    assert "25%" in text
    assert "layer [7] of 9" in text
    assert text.endswith("\x1b[2K"), "the line is cleared"


def test_progress_says_nothing_to_a_pipe():
    console = Console(file=io.StringIO(), width=120)
    with shown.watched(console, PASSING, 1, 1) as progress:
        progress(0.5, "layer 7")
    assert console.file.getvalue() == ""


def test_progress_ends_with_the_error_that_ended_the_probe():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with pytest.raises(KeyError), shown.watched(console, PASSING, 1, 1):
        raise KeyError
    assert console.file.getvalue().endswith("\x1b[2K")
