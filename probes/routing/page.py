"""Tables and heat map of the routing probe's page."""

import math

import numpy as np

from probes.finding import HeatMap, Part, Table, Text
from probes.routing.clamp import PATHS, Counter, Pushes
from probes.routing.layer import Routed

HEAT_MAP_EXPERTS = 32  # more columns are too narrow to read


def parts(layers: list[Routed], pushed: Pushes, counter: Counter, tokens: int) -> tuple[Part, ...]:
    """Everything below the findings, in the order of the page."""
    shown: list[Part] = [_choice(layers, tokens), _load(layers, tokens)]
    if len(layers[0].load) <= HEAT_MAP_EXPERTS:
        shown.append(_heat(layers, tokens))
    shown += [_clamp(layers, pushed, counter)]
    if missed := [path for path in PATHS if counter.share(path) == 0]:
        shown.append(
            Text(
                "What the prompt did not exercise",
                f"No value of the {' and '.join(missed)} path went beyond the clamp: without the pushed inputs above, "
                "a lost clamp there would have changed nothing in this run, and nothing in any answer to prompts like "
                "this one.",
            )
        )
    return tuple(shown)


def _choice(layers: list[Routed], tokens: int) -> Table:
    columns = (
        "layer",
        "choice by",
        "tokens elsewhere",
        "near ties",
        "tokens elsewhere without it, %",
        "weight error",
        "weight error with bias in weights",
        "outputs equal, %",
        "median distance",
        "shared expert, share of output",
    )
    rows = [
        (
            one.layer,
            "table" if one.hashed else "score + bias",
            len(one.wrong),
            None if one.hashed else one.near_ties,
            100 * one.would_differ / tokens,
            one.weight_error,
            None if one.hashed else one.weight_error_biased,
            100 * one.equal,
            float(np.median(one.mixture)),
            one.shared_twice,
        )
        for one in layers
    ]
    note = (
        'Weight errors count in what fp32 rounding explains, so 1 is the bound. "Without it": tokens that would have '
        "gone elsewhere without the bias, or (hash layers) by their scores. A near tie is left to fp32 and not judged."
    )
    return Table("Choice, weights, outputs", columns, rows, note)


def _load(layers: list[Routed], tokens: int) -> Table:
    rows = []
    for one in layers:
        share = one.load[one.load > 0] / one.load.sum()
        entropy = -float((share * np.log(share)).sum()) / math.log(len(one.load))
        rows.append(
            (
                one.layer,
                int((one.load == 0).sum()),
                int(one.load.min()),
                float(one.load.mean()),
                int(one.load.max()),
                float(one.load.max() / one.load.mean()),
                entropy,
            )
        )
    columns = ("layer", "experts without a token", "least", "mean", "most", "most / mean", "entropy")
    note = f"Tokens per expert, of {tokens}. Entropy of the load as a share of that of an even one."
    return Table("Load", columns, rows, note)


def _heat(layers: list[Routed], tokens: int) -> HeatMap:
    return HeatMap(
        "Share of tokens that each expert gets",
        "expert",
        "layer",
        tuple(str(expert) for expert in range(len(layers[0].load))),
        tuple(f"{one.layer}{' (table)' if one.hashed else ''}" for one in layers),
        [(one.load / tokens).tolist() for one in layers],
        f"An even load would put {layers[0].chosen / len(layers[0].load):.3g} everywhere.",
    )


def _clamp(layers: list[Routed], pushed: Pushes, counter: Counter) -> Table:
    columns = (
        "layer",
        "path",
        "largest gate",
        "gates beyond, %",
        "largest up",
        "ups beyond, %",
        "pushed to gate",
        "and up",
        "distance",
        "distance without clamp",
    )
    rows = []
    for path in PATHS:
        for one in layers:
            gate, up = (counter.hits[path, one.layer, which] for which in ("gate", "up"))
            each = pushed[path, one.layer]
            worst = max(each, key=lambda expert: expert.distance)
            rows.append(
                (
                    one.layer,
                    path,
                    gate.largest,
                    100 * gate.share,
                    up.largest,
                    100 * up.share,
                    worst.gate,
                    worst.up,
                    worst.distance,
                    min(expert.unclamped for expert in each),
                )
            )
    note = (
        f"The clamp stands at {counter.limit:g}. Left: what the prompt did. Right: real inputs, scaled up until gate "
        "and up pass it five times, and the distance of the output from float64, as a share of it; last, how far an "
        "expert without its clamp would be."
    )
    return Table("Clamp", columns, rows, note)
