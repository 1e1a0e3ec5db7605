"""`python -m scripts.findings`: write audits/FINDINGS.md, published claims beside what this project computed of them.

Nothing is measured: numbers follow from config.json files, from the classes of the caches, from closed formulas and
from draws that take a second, or are read out of the other pages of audits and their JSON. A page that lacks a number
which is asked of it ends the run.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from fathom.probes.finding import Part, Table, Text
from fathom.runtime.output import write_text
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.paths import AUDITS, Writes

if TYPE_CHECKING:
    from fathom.probes.report import Page
    from fathom.scripts.parts.claims import Row

TITLE: Final = "Findings: published claims about these models, caches and runtimes, and what was found here"
WHAT: Final = """\
Each row is a claim about DeepSeek-V4, CoDA-GQA-L or Shard, or what a runtime says of itself, that this project can
judge, where it was published, what was computed or measured here, and what follows."""
VERDICTS: Final = """\
- *reproduced*: the number found is the claim's, to the digits that the claim is written with or within {near:.0%}
  ({round:.1%} where it was read off a plot, or has one digit and zeros); or the statement held in what was measured.
- *corrected*: the claim's own quantities give another number, or it holds only with what the row says.
- *contradicted*: it was measured here, and was otherwise; or sources, or a source and itself, say two things of it
  that cannot both be so.
- *not checkable here*: it needs weights, data or a GPU that were not at hand. What stands beside it was measured on
  smaller models, or on a CPU, and decides nothing.

Sizes are read in the way that is best for the claim: GB as 10^9 or 2^30 bytes, MB and KB alike, 128K as 128,000 or
131,072 tokens, 1M as 1,000,000 or 1,048,576. KV caches are in BF16 where a row says nothing else. DeepSeek-V3.2 is by
its published dimensions. The first column is the source's, its words and figures in “”. Numbers of the third column are
computed when this page is made, by `python -m scripts.findings`, or read out of the page that the row names, which has
its own command."""
NOT_CLAIMED: Final = """\
That all else in the sources is right, or wrong: claims that nothing here computes or measures are left out, but for
those of the last table. A source may have been repaired since it was read. Measurements are of the demo checkpoint and
of a small Llama, on a CPU. Where a row says what V4 does, it is by its config.json or its published equations, not by a
run of its published weights."""

PAGE: Final = AUDITS / "FINDINGS.md"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.findings", description=__doc__)
    p.add_argument("--out", action=Writes, default=PAGE, help="file to write (default audits/FINDINGS.md)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run(arguments(parser(), argv))


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    from fathom.scripts.parts.claims import rows

    write_text(args.out, page(rows(), args.command_line).markdown())
    print(f"wrote {args.out}", file=sys.stderr)
    return 0


def page(found: "Sequence[Row]", command: str) -> "Page":
    """Return the page."""
    from fathom.probes.report import Page
    from fathom.runtime.report import commit
    from fathom.scripts.parts.claims import GROUPS, NEAR, ROUND, SOURCES

    parts: list[Part] = [
        *(table(group, [row for row in found if row.group == group]) for group in GROUPS),
        Text("Sources", "\n".join(f"- *{name}*: {told}" for name, told in SOURCES.items())),
        Text("How a verdict is reached", VERDICTS.format(near=NEAR, round=ROUND)),
        Text("What this does not claim", NOT_CLAIMED),
    ]
    facts = {
        "commit": str(commit()),
        "command": command,
        "machine": "any; nothing is timed, measured numbers are those of the pages that are named",
    }
    return Page("FINDINGS", TITLE, headline(found), WHAT, parts, facts, None)


def headline(found: "Sequence[Row]") -> str:
    """The count by verdict."""
    from fathom.scripts.parts.claims import Verdict

    counts = Counter(row.verdict for row in found)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    return f"{len(found)} claims: {told}"


def table(group: str, found: "Sequence[Row]") -> Table:
    """The rows of a group."""
    columns = ("claim", "source", "found here", "shown by", "verdict")
    cells = [
        [row.claim, "; ".join(row.source), row.found, ", ".join(_shown(row)), f"**{row.verdict}**"] for row in found
    ]
    return Table(group, columns, cells)


def _shown(row: "Row") -> Iterator[str]:
    """Pages as links, commands as code."""
    for one in row.shown:
        yield f"[{one}]({one})" if one.endswith(".md") else f"`{one}`"


if __name__ == "__main__":
    sys.exit(run_alone(main))
