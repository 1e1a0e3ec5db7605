"""What `scripts.compare --html` writes: one file with the verdict, the tables and two pictures; nothing is loaded."""

from collections.abc import Sequence
from html import escape
from typing import Final

from fathom.probes.finding import HeatMap, Plot
from fathom.probes.judge.checks import Judged, Status
from fathom.probes.pictures import picture
from fathom.scripts.console import Console, visible

PARTS: Final = 32  # of the positions, in the heat map
MOST: Final = 40  # sites in it
PAGE: Final = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #24292f; margin: 2em auto; max-width: 75em; padding: 0 1em }}
pre {{ font: 12.5px/1.35 ui-monospace, monospace; overflow-x: auto; white-space: pre-wrap }}
svg {{ max-width: 100%; height: auto }}
</style></head>
<body><h1>{title}</h1>
<pre>{said}</pre>
{pictures}
<details><summary>Names of the recording's tensors</summary>
<pre>{names}</pre></details>
</body></html>
"""


def html(title: str, out: Console, results: Sequence[Judged], depth: Plot, names: Sequence[str]) -> str:
    """The page: what was printed to a console that records, where the differences are, and what each name became."""
    said = out.export_html(inline_styles=True, code_format="{code}", clear=False)
    drawn = [("Through the layers", picture(depth))] if depth.series else []
    if (rows := heat_map(results)) is not None:
        drawn.append(("Through the prompt", picture(rows)))
    pictures = "\n".join(f"<h2>{escape(name)}</h2>\n{svg[svg.index('<svg') :]}" for name, svg in drawn)
    listed = escape(visible("\n".join(names)))
    return PAGE.format(title=escape(title), said=said, pictures=pictures, names=listed)


def heat_map(results: Sequence[Judged]) -> HeatMap | None:
    """Where in the prompt rows differ, by site; None where none does."""
    differing = [judged for judged in results if judged.status is Status.DIFFERS and judged.wrong][:MOST]
    if not differing:
        return None
    count = 1 + max(max(judged.wrong) for judged in differing)
    width = -(-count // PARTS)
    starts = range(0, count, width)
    values = [
        [sum(start <= row < start + width for row in judged.wrong) / width for start in starts] for judged in differing
    ]
    return HeatMap(
        "Rows that differ, by their place in the prompt",
        "position of the token, or number of the entry",
        "site",
        tuple(str(start) for start in starts),
        tuple(judged.name for judged in differing),
        values,
        note="share of the rows of each part of the prompt that differ",
    )
