"""The console's tables and the page of a bench, both of its JSON alone."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table as ConsoleTable

from fathom.probes.finding import Bars, Part, Table, Text
from fathom.probes.report import Page, write
from fathom.runtime.report import Commit
from fathom.scripts.bench import turns
from fathom.scripts.bench.turns import JSON, Spread
from fathom.scripts.console import Console

__all__ = ["page", "show", "write"]

RATIOS = "Ratios of two sides, the median of all rounds (smallest .. largest):"
SHOWN = 7  # parts that a picture tells apart; the others are one
MOST = 32  # bars of a picture


def show(document: JSON) -> None:
    """Print every table."""
    console = Console()
    for part in _tables(document):
        table = ConsoleTable(*part.columns, title=part.title)
        for row in part.rows:
            table.add_row(*map(str, row))
        console.print(table)
    console.say(_verdict(document) + ".", *turns.summary(document["rows"]))


def page(name: str, title: str, doc: str, document: JSON) -> Page:
    """The page: verdict, what is measured (the first paragraph of `doc`), ratios, pictures, tables, how."""
    what, _, how = doc.partition("\n\n")
    said = [f"* {line}." for line in turns.summary(document["rows"])]
    if said:
        said = [RATIOS, "", *said]
    parts = [*_pictures(document["rows"]), *_tables(document), *([Text("How it was measured", how)] if how else [])]
    facts = {
        **{name: document[name] for name in ("run", "command", "machine", "versions", "settings")},
        "commit": str(Commit(**document["commit"])),
    }
    data = document if document["rows"] else None
    return Page(name, title, _verdict(document), "\n".join([what, "", *said]), parts, facts, data)


def _verdict(document: JSON) -> str:
    rows = document["rows"]
    if not rows:
        return "Of this code NOTHING was measured on a GPU: the machine that wrote this page has none"
    told = []
    if wrong := [row["case"] for row in rows if turns.differs(row)]:
        told.append(f"{len(wrong)} of {len(rows)} cases do NOT compute the same on all sides: {', '.join(wrong)}")
    if asked := turns.asked(rows):
        missed = [
            f"{target.label}{'' if target.measure in turns.UNITS else f', {target.measure}'}"
            f" ({turns.short(target.found.median)} times, asked for {target.told})"
            for target in asked if not target.reached
        ]  # fmt: skip
        reached = f"{len(asked) - len(missed)} of {len(asked)} targets are reached"
        told.append(f"{reached}; missed: {'; '.join(missed)}" if 0 < len(missed) <= SHOWN else reached)
    return "; ".join(told) or (turns.summary(rows) or [f"{len(rows)} cases were measured"])[0]


def _tables(document: JSON) -> list[Table]:
    """Every table once."""
    rows = document["rows"]
    tables = [Table(title, tuple(heads), cells) for title, (heads, cells) in turns.tables(rows).items()]
    if asked := turns.asked(rows):
        cells = [
            [
                target.label,
                target.measure,
                target.told,
                str(target.found),
                "reached" if target.reached else "missed",
            ]
            for target in asked
        ]
        tables.append(Table("What was asked for", ("case", "what", "ratio asked for", "ratio found", ""), cells))
    judged = [[row["case"], _apart(row), str(len(row["agreement"]))] for row in rows if row["agreement"]]
    if judged:
        tables.append(Table("Do the sides compute the same?", ("case", "apart, of how much", "judged"), judged))
    return [
        *tables,
        *(Table(told["title"], tuple(told["columns"]), told["rows"], told["note"]) for told in document["tables"]),
    ]


def _apart(row: JSON) -> str:
    """How far the sides are apart, and how far they may be, of the round in which they were furthest."""
    worst = max(row["agreement"], key=lambda found: max(found["apart"]))
    return f"{Spread.of(worst['apart'])}; at most {worst['bound']}"


def _pictures(rows: Sequence[JSON]) -> list[Part]:
    """Of each table the ratios with their spread, or where the time goes."""
    found: list[Part] = []
    for title in dict.fromkeys(row["table"] for row in rows):
        cases = [row for row in rows if row["table"] == title and row["rounds"]]
        for side in dict.fromkeys(side for row in cases for side in turns.others(row)):
            bars = {
                f"{row['case']}: {name}" if len(turns.headlines(row)) > 1 else row["case"]: Spread.of(ratios)
                for row in cases if side in turns.others(row)
                for name in turns.headlines(row)
                if (ratios := turns.ratios(row, side, name))
            }  # fmt: skip
            if 1 < len(bars) <= MOST:
                over = f"{side} / {cases[0]['sides'][0]}"
                values: dict[str, Sequence[float]] = {over: [spread.median for spread in bars.values()]}
                spreads = [(spread.low, spread.high) for spread in bars.values()]
                name, limits = f"{title}: {over}", {"equal": 1.0}
                found.append(Bars(name, "ratio", tuple(bars), values, spreads, limits, log_y=True))
        found += [picture for row in cases if not row["compared"] for picture in _parts(row)]
    return found


def _parts(row: JSON) -> list[Part]:
    """Of a row whose measures are parts of something: a stack for each side."""
    kinds = dict.fromkeys(name.partition(": ")[0] for name in turns.measures(row) if name.endswith(": all"))
    pictures: list[Part] = []
    for kind in kinds:
        parts = [name for name in turns.measures(row) if name.startswith(f"{kind}: ") and not name.endswith(": all")]
        by_side = {
            side: {name: median(turns.values(row, side, name) or [0.0]) for name in parts} for side in row["sides"]
        }
        largest = sorted(parts, key=lambda name: -by_side[row["sides"][-1]][name])
        stacks: dict[str, Sequence[float]] = {
            name: [by_side[side][name] for side in row["sides"]] for name in largest[:SHOWN]
        }
        stacks["the rest"] = [sum(by_side[side][name] for name in largest[SHOWN:]) for side in row["sides"]]
        pictures.append(Bars(f"{row['table']}: {kind}", "ms", tuple(row["sides"]), stacks))
    return pictures
