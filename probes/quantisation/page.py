"""Summary, tables and plots of the quantisation probe's page."""

from collections.abc import Sequence

import numpy as np

from model.observe import sites
from model.observe.sites import Site
from probes.finding import Part, Plot, Table
from probes.quantisation import cost as rounding_cost
from probes.quantisation import scales as stored_scales
from probes.quantisation.cases import Rounding
from probes.quantisation.cost import Costs
from probes.quantisation.pair import DECIDED, Pair
from probes.quantisation.scales import Stored

Series = dict[str, Sequence[tuple[float, float]]]
BINS = 32  # of positions, in the plot of KL
BY_DEPTH = {
    "attention, before its projection": sites.MIXED,
    "attention output": sites.ATTENTION_OUTPUT,
    "experts output": sites.EXPERTS_OUTPUT,
    "streams after the layer": sites.STREAMS,
}
AT_SITES = (
    sites.QUERY,
    sites.KV,
    sites.ENTRY,
    sites.INDEX_QUERY,
    sites.INDEX_KEY,
    sites.MIXED,
    sites.ATTENTION_OUTPUT,
    sites.EXPERTS_INPUT,
    sites.EXPERTS_OUTPUT,
    sites.STREAMS,
)


def summary(pair: Pair, ops: list[Rounding], stored: list[Stored]) -> str:
    """The sentence at which a hurried reader stops."""
    last, decided = len(pair.config.layer_kinds) - 1, pair.decided()
    clear = f"at {sum(decided)} of the {len(decided)} where plain is decided" if decided else "plain is nowhere decided"
    exponents = [exponent for form in stored for exponent in form.exponents]
    scales = (
        f"Stored scales run from 2^{min(exponents)} to 2^{max(exponents)}." if exponents else "No scales are stored."
    )
    return (
        f"Deployed rounding costs {np.mean(pair.kl):.2g} nats a token at the logits (worst {max(pair.kl):.2g}); the "
        f"likeliest token is the same at {np.mean(pair.agree):.1%} of {len(pair.kl)} positions ({clear}). After the "
        f"last layer the streams differ by {pair.share(sites.STREAMS, last) or 0:.1%}. Of "
        f"{sum(op.values for op in ops)} values that the run's ops rounded, {sum(op.unlike for op in ops)} are unlike "
        f"an independent cast. {scales}"
    )


def parts(pairs: dict[str, Pair], local: list[Costs], stored: list[Stored], ops: list[Rounding]) -> tuple[Part, ...]:
    """Everything below the findings, in the order of the page."""
    pair = pairs["all"]
    return (
        _logits(pair),
        *([_alone(pairs)] if len(pairs) > 1 else []),
        _by_position(pair),
        _depth_plot(pair),
        _depth(pair),
        rounding_cost.table(local),
        _ops(ops),
        *([stored_scales.table(stored)] if stored else []),
    )


def _logits(pair: Pair) -> Table:
    kl, margin, agree = np.array(pair.kl), np.array(pair.margin), np.array(pair.agree)
    known, decided = max(1, len(kl) - 1), pair.decided()
    rows: list[tuple[str, float | None]] = [
        ("KL from plain to deployed, mean, nats", float(kl.mean())),
        ("... median", float(np.median(kl))),
        ("... 99 % of positions are below", float(np.quantile(kl, 0.99))),
        ("... worst", float(kl.max())),
        ("loss of the next token, plain, nats", pair.loss[1] / known),
        ("... deployed less plain", (pair.loss[0] - pair.loss[1]) / known),
        ("same likeliest token, % of positions", 100 * float(agree.mean())),
        ("decided positions, %", 100 * len(decided) / len(kl)),
        ("same likeliest token, % of decided positions", 100 * sum(decided) / len(decided) if decided else None),
        (
            "largest margin at which the likeliest token changed",
            float(margin[~agree].max()) if not agree.all() else 0.0,
        ),
    ]
    note = f"Margin: probability between plain's first two tokens; a position is decided from {DECIDED:g} on."
    return Table("At the logits", ("", "measured"), rows, note)


def _alone(pairs: dict[str, Pair]) -> Table:
    layers = range(len(pairs["all"].config.layer_kinds))

    def row(name: str, pair: Pair) -> tuple[float | str | None, ...]:
        overlaps = ([pair.overlap(site, layer) for layer in layers] for site in (sites.SELECTED, sites.EXPERT_IDS))
        known = [[share for share in shares if share is not None] for shares in overlaps]
        return (
            name,
            float(np.mean(pair.kl)),
            max(pair.kl),
            100 * float(np.mean(pair.agree)),
            *(100 * float(np.mean(shares)) if shares else None for shares in known),
            100 * (pair.share(sites.STREAMS, layers[-1]) or 0),
        )

    columns = (
        "rounded",
        "KL, mean",
        "KL, worst",
        "same likeliest token, %",
        "entries in common, %",
        "experts in common, %",
        "difference of the last streams, %",
    )
    note = (
        "Each against plain, in runs of their own; entries and experts in common are means over the layers that choose."
    )
    return Table("One kind of rounding at a time", columns, [row(*item) for item in pairs.items()], note)


def _by_position(pair: Pair) -> Plot:
    bins = [part for part in np.array_split(np.arange(len(pair.kl)), BINS) if len(part)]
    kl = np.maximum(np.array(pair.kl), 1e-12)
    series: Series = {
        "mean": [(float(part.mean()), float(kl[part].mean())) for part in bins],
        "worst": [(float(part.mean()), float(kl[part].max())) for part in bins],
    }
    note = f"In {len(bins)} stretches of the prompt."
    return Plot("KL by position", "position", "nats", series, log_y=True, note=note)


def _depth_plot(pair: Pair) -> Plot:
    series: Series = {}
    for name, site in BY_DEPTH.items():
        shares = [(layer, pair.share(site, layer)) for layer in range(len(pair.config.layer_kinds))]
        series[name] = [(float(layer), 100 * share) for layer, share in shares if share]
    note = "RMS of deployed minus plain, in % of the RMS of plain, in two free runs of the same prompt."
    return Plot("Difference by depth", "layer", "%", series, note=note)


def _depth(pair: Pair) -> Table:
    def percent(share: float | None) -> float | None:
        return None if share is None else 100 * share

    def row(layer: int) -> tuple[float | str | None, ...]:
        shares = (percent(pair.share(site, layer)) for site in AT_SITES)
        chosen = (percent(pair.overlap(site, layer)) for site in (sites.SELECTED, sites.EXPERT_IDS))
        return (layer, pair.config.layer_kind(layer).name, *shares, *chosen)

    layers = range(len(pair.config.layer_kinds))
    columns = ("layer", "kind", *(_heading(site) for site in AT_SITES), "entries in common", "experts in common")
    note = (
        "In %. Differences as in the plot. In common: of plain's choices, those that deployed made too, where there "
        "was a choice (more entries than are selected; layers that route by score)."
    )
    return Table("Deployed against plain, by site", columns, [row(layer) for layer in layers], note)


def _heading(site: Site) -> str:
    return site.name.replace("attention.", "").replace("indexer.", "index ").replace(".", " ")


def _ops(ops: list[Rounding]) -> Table:
    rows = [(op.what, op.values, op.unlike, op.blocks, op.off_grid) for op in ops]
    note = (
        "Cases: amax on, just above and just below powers of two and the format's largest times them; every number of "
        "the format and every midpoint; tiny, huge, zeros, outliers, in fp32 and bf16; and what the prompt brought."
    )
    return Table(
        "Rounding ops against an independent cast", ("op", "values", "unlike", "blocks", "off grid"), rows, note
    )
