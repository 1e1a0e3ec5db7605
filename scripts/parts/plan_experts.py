"""What `scripts.plan` shows of several ranks: what they exchange, and how long it takes, by where experts lie."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fathom.model.errors import ConfigError
from fathom.runtime.plan.exchanges import Exchange
from fathom.runtime.plan.experts import WAYS, Choice, Work, planner
from fathom.runtime.plan.gpus import GPUS, Rates
from fathom.runtime.plan.planner import Planner
from fathom.runtime.plan.prefill import Prefill
from fathom.runtime.plan.token import Token


def summary(choice: Choice, work: Work, gpu: str | None, ways: Mapping[str, Planner]) -> dict[str, Any]:
    """Everything that is shown, as JSON values: of each way a call at the end of the prompt, and a token after it."""
    rates = None if gpu is None else GPUS[gpu].rates
    return {
        "way": choice.way,
        "why": choice.why,
        "seconds": dict(choice.seconds),
        "prompt_tokens": work.prompt,
        "new_tokens": work.new,
        "gpu": gpu,
        "ways": {} if rates is None else {way: _of_way(one, work, rates) for way, one in ways.items()},
    }


def both_ways(one: Planner, ranks: int) -> dict[str, Planner]:
    """Planners of the ways that this model can be on so many ranks; of the first, which has the most to do."""
    found = {}
    for way in WAYS:
        try:
            found[way] = planner(one.config, one.census, one.options, ranks, way)
        except ConfigError:  # experts that do not divide so
            continue
    return found


def tables(data: dict[str, Any]) -> list[Table]:
    """A call and a token, both ways side by side."""
    ways = data["ways"]
    if not ways:
        return []
    tokens = next(iter(ways.values()))["prefill"]["tokens"]
    call = f"a call of {tokens:,} tokens at the end of {data['prompt_tokens']:,}"
    return [
        _table(f"{what} on {data['gpu']}: by arithmetic", {way: found[part] for way, found in ways.items()})
        for part, what in (("prefill", call), ("token", "a decoded token after them"))
    ]


def _of_way(one: Planner, work: Work, rates: Rates) -> dict[str, Any]:
    call = one.prefill(min(one.options.prefill_chunk, work.prompt), work.prompt, rates)
    token = one.token(work.prompt, rates)
    assert token is not None, "caches are in full"
    return {"prefill": _of_call(call), "token": of_token(token)}


def _of_call(call: Prefill) -> dict[str, Any]:
    return {
        "tokens": call.tokens,
        "exchanges": _exchanges(call.exchanges, call.rates),
        "seconds": {
            "exchanges": call.exchanging,
            **{f"products: {name}": seconds for name, seconds in call.products.items()},
            "hidden": 0 - call.hidden,
            "all": call.seconds,
        },
    }


def of_token(token: Token) -> dict[str, Any]:
    """A token as JSON values, but for its caches."""
    return {
        "exchanges": _exchanges(token.exchanges, token.rates),
        "seconds": {
            "exchanges": token.exchanging,
            "reading": token.reading,
            "launches": token.launching,
            "all": token.seconds,
        },
    }


def _exchanges(found: Sequence[Exchange], rates: Rates) -> list[dict[str, Any]]:
    return [one._asdict() | {"seconds": one.seconds(rates.link)} for one in found]


def _table(title: str, by_way: Mapping[str, dict[str, Any]]) -> Table:
    table = Table("experts on ranks", title=title)
    for way in by_way:
        for column in (f"{way}: times", "bytes of each", "microseconds"):
            table.add_column(column, justify="right")
    exchanges = [{one["what"]: one for one in found["exchanges"]} for found in by_way.values()]
    names = list(dict.fromkeys(what for found in exchanges for what in found))
    parts = [what.partition(",")[0] for what in names]
    for what in sorted(names, key=lambda what: parts.index(what.partition(",")[0])):  # a sublayer's side by side
        table.add_row(f"exchange: {what}", *(cell for found in exchanges for cell in _cells(found.get(what))))
    table.add_section()
    seconds = [found["seconds"] for found in by_way.values()]
    for what in seconds[0]:
        if what == "all":
            table.add_section()
        table.add_row(what, *(cell for found in seconds for cell in ("", "", f"{1e6 * found[what]:,.1f}")))
    return table


def _cells(one: dict[str, Any] | None) -> tuple[str, str, str]:
    if one is None:
        return "-", "-", "-"
    return f"{one['times']:,}", f"{one['nbytes']:,}", f"{1e6 * one['seconds']:,.1f}"
