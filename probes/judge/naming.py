"""Names: which tensor of another runtime is which site, from tables that are data, `names/*.toml`.

A table says of each name what the tensor is, how its axes lie, what is cut over tensor-parallel ranks, and of others
why they are none of ours. `named` applies one to a dump: calls of a prompt are put one after the other, ranks together,
and what comes out has the names of our sites, to be read as any recording.
"""

import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, quoted
from fathom.model.observe import sites
from fathom.model.observe.sites import SITES, STEPS, axes
from fathom.probes.judge.dump import Dump, Piece

NO_SITE: Final = "no site"
TABLES: Final = Path(__file__).parent / "names"
TOKENS, POSITIONS = "tokens", "positions"
LAST: Final = (sites.HIDDEN.name, sites.LOGITS.name)  # of which a run often keeps the last token's row alone
WHOLE: Final = (TOKENS, POSITIONS, sites.EMBEDDED.name, *LAST)  # of no layer
WRAPPERS: Final = re.compile(
    r"(?:non_intrusive__|module\.|model\.|base_model\.|_orig_mod\.)+"
)  # what a name may begin with more, or less
RANKS: Final = ("same", "sum", "heads", "intermediate", "vocab", "t")
OF_NAMES: Final = ("which", "item")  # keys that say how a name is spelled


class Rule(NamedTuple):
    """A line of a table: a name of theirs and what it is."""

    theirs: str
    pattern: re.Pattern[str]
    site: str
    axes: tuple[str, ...]  # theirs, in their order; several run together are joined by *. Empty: as the site's
    columns: str = ""
    times: tuple[str, ...] = ()
    rows_sum: str = ""  # rows that sum to 1 are to be multiplied by this field of the config
    sum: bool = False  # with the other rules of its site
    stream: int | None = None
    ranks: str = "same"
    kinds: tuple[str, ...] = ()
    layers: str = ""  # first | not first | last: in which alone it is that
    of_layer: int = 0  # of another layer than the one in the name: so many on
    so_far: bool = False  # each call has all rows so far
    padded: bool = False  # behind the entries of a call come rows of nothing
    masked: bool = False  # numbers of entries that are not finished are among those selected, and masked later
    ambiguous: bool = False  # other tensors have the name too: those of other widths are passed over
    note: str = ""


class Table(NamedTuple):
    """The names of a runtime."""

    name: str
    runtime: str
    read_from: str
    rules: tuple[Rule, ...]
    left_out: tuple[tuple[re.Pattern[str], str], ...]  # and why
    aligned: bool = True  # calls of one number are of one forward pass, whichever tensor


class Line(NamedTuple):
    """What became of a tensor of a dump."""

    theirs: str
    shape: tuple[int, ...]
    site: str  # as recordings name it; empty: left out
    why: str  # it is left out, or how it was read


@dataclass(frozen=True)
class Made:
    """A tensor of ours, made of pieces of theirs."""

    site: str
    told: str  # what it is made of
    outline: Tensor
    read: Callable[[], Tensor]


@dataclass
class Named:
    """A dump by our names."""

    tensors: dict[str, Made] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    calls: tuple[int, ...] = ()  # tokens of each call of the prompt, where the dump tells calls apart


@cache
def tables() -> dict[str, Table]:
    """All tables, by the names of their files."""
    return {path.stem: read_table(path) for path in sorted(TABLES.glob("*.toml"))}


def read_table(path: Path) -> Table:
    """Read a table; ConfigError naming the entry that says something else than tables do."""
    found = tomllib.loads(path.read_text("utf-8"))
    rules = []
    for entry in found["tensor"]:
        if unknown := sorted(entry.keys() - {*Rule._fields, *OF_NAMES}):
            raise ConfigError(f"{path}: {entry.get('theirs')}: {unknown[0]} is no key of a table")
        values = dict(entry)
        item = values.pop("item", None)
        pattern = _pattern(values["theirs"], values.pop("which", None), item)
        for key in ("times", "kinds"):
            values[key] = tuple(values.get(key, ()))
        values["axes"] = tuple(values.get("axes", "").split())
        if values.setdefault("ranks", "same") not in RANKS:
            raise ConfigError(f"{path}: {values['theirs']}: ranks {values['ranks']}")
        rules.append(Rule(pattern=pattern, **values))
    left_out = tuple(
        (_pattern(name, None, None), entry["why"])
        for entry in found.get("left_out", ())
        for name in ([entry["theirs"]] if isinstance(entry["theirs"], str) else entry["theirs"])
    )
    aligned = found.get("aligned", True)
    return Table(path.stem, found["runtime"], found["read_from"], tuple(rules), left_out, aligned)


def _pattern(theirs: str, which: str | None, item: int | str | None) -> re.Pattern[str]:
    """A name as a pattern; `which` and `item` say what of a module it is, however whoever hooked it spelt that."""
    text = re.escape(_bare(theirs)).replace(r"\{l\}", r"(?P<layer>\d{1,6})").replace(r"\{layers\}", r"\d{1,6}")
    text = text.replace(r"\*", ".*")
    if which == "output":
        text += rf"[._/](?:outputs?|out)[._/]{item}" if item else r"(?:[._/](?:outputs?|out)(?:[._/]0)?)?"
    elif which == "input":
        some = "inputs?|in|kwargs" if isinstance(item, str) else "inputs?|in|args"
        text += rf"[._/](?:{some})" + (rf"[._/]{item}" if item else r"(?:[._/]0)?")
    return re.compile(text)


def _bare(name: str) -> str:
    """A name without what wraps a model."""
    found = WRAPPERS.match(name)
    return name[found.end() :] if found else name


# --- which table, and what each name is


class _Sense(NamedTuple):
    """What a table says of a name; it may say several things, of parts of the tensor."""

    name: str
    order: int  # of the rule in the table
    rule: Rule
    at: int | None  # the layer's number in the name
    layer: int | None  # that it is of

    @property
    def site(self) -> str:
        return self.rule.site if self.layer is None else f"layers.{self.layer}.{self.rule.site}"


def _senses(table: Table, name: str, last: int = 0) -> list[_Sense]:
    """All that a table says of a name, in a model whose last layer has this number."""
    found = []
    for order, rule in enumerate(table.rules):
        if match := _match(table, rule.pattern, name):
            number = match.groupdict().get("layer")
            at = None if number is None else int(number)
            own = None if rule.site in WHOLE else last if at is None and rule.layers == "last" else at
            found.append(_Sense(name, order, rule, at, None if own is None else own + rule.of_layer))
    return found


def _match(table: Table, pattern: re.Pattern[str], name: str) -> re.Match[str] | None:
    if table.name == "ds4":  # whose files begin with whatever the user wrote
        return next((m for at in _starts(name) if (m := pattern.fullmatch(name, at))), None)
    return pattern.fullmatch(_bare(name))


def _starts(name: str) -> Iterator[int]:
    yield 0
    yield from (at + 1 for at, letter in enumerate(name) if letter == "_")


def fitting(dump: Dump) -> Table | None:
    """The table that a dump's form goes with, or else the one that knows most of its names; None where none does."""
    every = tables()
    names = {piece.name for piece in dump.pieces}
    known = {name: sum(bool(_senses(every[name], one)) for one in names) for name in dump.tables or every}
    best = max(known, key=lambda name: known[name])
    return every[best] if known[best] or dump.tables else None


# --- a dump by our names


def named(dump: Dump, config: ModelConfig, tokens: Tensor | None, taken: Collection[str]) -> Named:
    """Give the tensors of a dump our names.

    Parameters
    ----------
    dump
        What there is.
    config
        Of the model.
    tokens
        The prompt, [t] int64, where the dump lacks it or has more prompts than one.
    taken
        Names of theirs that are known already, which no table is asked about.

    Raises
    ------
    ConfigError
        Two tensors are the same site, or no call is the prompt's.

    """
    out, table = Named(), fitting(dump)
    by_name: dict[str, list[Piece]] = {}
    for piece in dump.pieces:
        by_name.setdefault(piece.name, []).append(piece)
    if table is None:
        out.lines += [Line(name, _shape(some), "", NO_SITE) for name, some in by_name.items() if name not in taken]
        return out
    senses = list[_Sense]()
    for name, some in by_name.items():
        found = [] if name in taken else _senses(table, name, config.num_hidden_layers - 1)
        senses += found
        if not found and name not in taken:
            out.lines.append(Line(name, _shape(some), "", _why_not(table, name)))
    made = _Making(dump, table, config, tokens, by_name, senses)
    out.told.append(f"names of {table.runtime}, as of {table.read_from}")
    out.told += made.told
    out.calls = made.lengths
    made.into(out)
    out.lines += [Line(name, (), "", why) for name, why in dump.left.items()]
    return out


def _shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    return tuple(pieces[0].outline.shape)


def _why_not(table: Table, name: str) -> str:
    why = next((why for pattern, why in table.left_out if _match(table, pattern, name)), None)
    return why or f"no name in the table of {table.runtime}"


class _Making:
    """Puts calls one after the other, ranks together, and axes in our order."""

    def __init__(
        self,
        dump: Dump,
        table: Table,
        config: ModelConfig,
        tokens: Tensor | None,
        pieces: Mapping[str, Sequence[Piece]],
        senses: Sequence[_Sense],
    ) -> None:
        self.dump, self.table, self.config, self.given = dump, table, config, tokens
        self.pieces, self.senses, self.sizes = pieces, senses, axes(config)
        self.told: list[str] = []
        self.rows = self._rows() if table.aligned else {}  # tokens of each call
        self.first = self._firsts()  # positions of the first tokens of calls, where the dump says them
        self.calls = self._prompt()
        self.lengths = tuple(self.rows[call] for call in self.calls) if len(self.rows) > 1 else ()

    # --- sizes

    def _axes(self, rule: Rule) -> tuple[str, ...]:
        return rule.axes or tuple(SHAPES.get(rule.site, "").split())

    def _size(self, axis: str) -> int | None:
        """Of an axis; of several that are run together, or lie one behind the other."""
        if "+" in axis:
            ends = [self._size(end) for end in axis.split("+")]
            return None if None in ends else sum(end or 0 for end in ends)
        parts = [int(part) if part.isdigit() else self.sizes.get(part) for part in axis.split("*")]
        return None if None in parts else math.prod(part or 1 for part in parts)

    def _count(self, rule: Rule, piece: Piece) -> int | None:
        """Tokens of a piece that has a row of a known width for each, on one rank or on all; None otherwise."""
        order = self._axes(rule)
        sizes = [self._size(axis) for axis in order if axis != "t"]
        if rule.so_far or len(sizes) == len(order) or None in sizes or rule.site in LAST:
            return None
        width = math.prod(size or 1 for size in sizes)
        if rule.ranks not in ("same", "sum", "t"):
            width //= len({other.rank for other in self.pieces[piece.name]})
        count, rest = divmod(piece.outline.numel(), width)
        return None if rest else count

    def _fits(self, rule: Rule, piece: Piece) -> bool:
        """Whether a piece may be what an ambiguous name says, by its last axis."""
        order, shape = self._axes(rule), list(piece.outline.shape)
        while len(shape) > len(order) and shape[0] == 1:
            del shape[0]
        own = self._size(order[-1]) if order else None
        return len(shape) == len(order) and own in (None, shape[-1])

    # --- which calls are the prompt's

    def _rows(self) -> dict[tuple[int, ...], int]:
        """Tokens of each call, in order."""
        found: dict[tuple[int, ...], int] = {}
        for sense in self.senses:
            if sense.rule.site == TOKENS:
                found |= {piece.call: piece.outline.numel() for piece in self.pieces[sense.name]}
        for sense in self.senses if not found else ():
            for piece in self.pieces[sense.name]:
                if (count := self._count(sense.rule, piece)) is not None:
                    found.setdefault(piece.call, count)
        return dict(sorted(found.items()))

    def _prompt(self) -> list[tuple[int, ...]]:
        """The calls that are of the prompt, in order."""
        calls = list(self.rows)
        if len(calls) < 2:
            return calls
        runs = self._runs(calls)
        if self.given is not None:
            runs = [run for run in runs if self._is_given(run)]
        if not runs:
            which = "begins at position 0" if self.given is None else "is of the tokens that --tokens has"
            raise ConfigError(f"{self.dump.path}: none of its {len(calls)} calls {which}")
        best = max(reversed(runs), key=lambda run: sum(self.rows[call] for call in run))
        if len(best) < len(calls):
            tokens = sum(self.rows[call] for call in best)
            others = ", ".join(str(self.rows[call]) for call in calls if call not in best)
            what = f"{len(best)} of {len(calls)} calls are taken as the prompt, {tokens} tokens"
            self.told.append(f"{what}; the others, of {others} tokens, are left out")
        return best

    def _runs(self, calls: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Calls that follow one another: a prompt and what was decoded after it, from position 0 each."""
        runs: list[list[tuple[int, ...]]] = []
        after = 0  # position of the token that would follow
        for call in calls:
            first = self.first.get(call)
            if first is not None:
                new = not runs or first != after
            elif self.given is not None:
                new = not runs or not self._is_given([*runs[-1], call], whole=False)
            else:
                new = not runs or self.rows[call] > 1
            if new:
                runs.append([])
            runs[-1].append(call)
            after = (first if first is not None else 0 if new else after) + self.rows[call]
        return [run for run in runs if self.first.get(run[0], 0) == 0]

    def _firsts(self) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        for sense in self.senses:
            for piece in self.pieces[sense.name]:
                if piece.first is not None:
                    found[piece.call] = piece.first
                elif sense.rule.site == POSITIONS and piece.call not in found and piece.outline.numel():
                    found[piece.call] = int(piece.read().flatten()[0])
        return found

    def _is_given(self, run: Sequence[tuple[int, ...]], *, whole: bool = True) -> bool:
        """Whether these calls are of the tokens that were given, or of their beginning."""
        assert self.given is not None, "tokens to compare with"
        count = sum(self.rows[call] for call in run)
        if count > len(self.given) or (whole and count != len(self.given)):
            return False
        name = next((sense.name for sense in self.senses if sense.rule.site == TOKENS), None)
        if name is None:
            return True
        by_call = {piece.call: piece for piece in self.pieces[name]}
        ids = [by_call[call].read().flatten().long() for call in run if call in by_call]
        return len(ids) == len(run) and torch.equal(torch.cat(ids), self.given[:count])

    # --- tensors

    def into(self, out: Named) -> None:
        """Make a tensor of each site, and say what became of each name."""
        by_site: dict[str, list[_Sense]] = {}
        for sense in self.senses:
            by_site.setdefault(sense.site, []).append(sense)
        for site, senses in by_site.items():
            self._site(out, site, sorted(senses, key=lambda sense: sense.order))

    def _site(self, out: Named, site: str, senses: Sequence[_Sense]) -> None:
        """Make one tensor of those that the site may be taken from: of the first, or of all that it is the sum of."""
        chosen = [(sense, *self._chosen(sense)) for sense in senses]
        for sense, why, pieces in chosen:
            if why and not pieces:
                self._left(out, sense, why)
        usable = [(sense, pieces) for sense, _, pieces in chosen if pieces]
        if usable:
            self._made(out, site, usable)

    def _left(self, out: Named, sense: _Sense, why: str) -> None:
        out.lines.append(Line(sense.name, _shape(self.pieces[sense.name]), "", why))

    def _made(self, out: Named, site: str, usable: Sequence[tuple[_Sense, list[Piece]]]) -> None:
        terms = self._terms(usable)
        if isinstance(terms, str):
            for sense, _ in usable:
                self._left(out, sense, terms)
            return

        def read(by: Callable[[Piece], Tensor]) -> Tensor:
            parts = [self._joined(sense.rule, sense.layer, pieces, by) for sense, pieces in terms]
            return parts[0] if len(parts) == 1 else torch.stack([part.float() for part in parts]).sum(0)

        used = [sense for sense, _ in terms]
        try:
            outline = read(lambda piece: piece.outline)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # sizes are not what the table says
            for sense in used:
                self._left(out, sense, f"cannot be read as {site}: {str(error).splitlines()[0]}")
            return
        out.lines += [Line(one.name, _shape(pieces), site, one.rule.note) for one, pieces in terms]
        for sense, _ in usable:
            if sense not in used:
                self._left(out, sense, f"{site} is taken from {used[0].name}")
        told = " + ".join(sense.name for sense in used)
        out.tensors[site] = Made(site, told, outline, lambda: read(lambda piece: piece.read()))

    def _terms(self, usable: Sequence[tuple[_Sense, list[Piece]]]) -> list[tuple[_Sense, list[Piece]]] | str:
        """What a site is made of, or why it cannot be; ConfigError where two tensors are the same."""
        first = usable[0][0]
        if first.rule.sum:
            wanted = sum(rule.sum and rule.site == first.rule.site for rule in self.table.rules)
            terms = [(sense, pieces) for sense, pieces in usable if sense.rule.sum]
            return terms if len(terms) == wanted else f"{first.site} is a sum of {wanted} tensors, not all are there"
        again = [sense.name for sense, _ in usable[1:] if sense.order == first.order]
        if again and first.site not in (TOKENS, POSITIONS):
            raise ConfigError(f"{self.dump.path}: {quoted(first.name)} and {quoted(again[0])} are both {first.site}")
        return list(usable[:1])

    def _chosen(self, sense: _Sense) -> tuple[str, list[Piece]]:
        """The pieces of a tensor that are the prompt's, or why there are none."""
        rule, layer, every = sense.rule, sense.layer, self.pieces[sense.name]
        if layer is not None and layer < 0:
            return "", []  # before the first
        at, count = layer if layer is not None else sense.at, self.config.num_hidden_layers
        if at is not None and at >= count:
            return f"layer {at} is beyond the model's {count}", []
        if layer is not None and rule.kinds and self.config.layer_kind(layer).name not in rule.kinds:
            return f"in {self.config.layer_kind(layer).name} layers it is not {rule.site}", []
        if at is not None and (wrong := _other_layer(rule, at, count)):
            return wrong, []
        pieces = [piece for piece in every if not rule.ambiguous or self._fits(rule, piece)]
        if not self.table.aligned:
            found = self._sequence(rule, pieces)
            return ("" if rule.ambiguous else "no calls of it are as long as the prompt"), found
        pieces = [piece for piece in pieces if not self.calls or piece.call in self.calls or self._inside(rule, piece)]
        return ("" if rule.ambiguous and len(every) > 1 else "of other calls than the prompt's"), pieces

    def _inside(self, rule: Rule, piece: Piece) -> bool:
        """Whether entries that lie by the position of a token are of the prompt's tokens."""
        start = self.first.get(self.calls[0])
        if piece.first is None or start is None or self._axes(rule)[0] not in ENTRIES:
            return False
        return start <= piece.first < start + sum(self.rows[call] for call in self.calls)

    def _sequence(self, rule: Rule, pieces: Sequence[Piece]) -> list[Piece]:
        """The last calls that follow one another and are as long as the prompt together."""
        if self.given is None:
            raise ConfigError(f"{self.dump.path}: {self.dump.form} say no tokens: give them with --tokens")
        counts: dict[tuple[int, ...], int] = {}
        for piece in pieces:
            count = piece.outline.numel() if rule.site == POSITIONS else self._count(rule, piece)
            if count is not None:
                counts[piece.call] = count
        calls = sorted(counts)
        for end in range(len(calls), 0, -1):
            total = 0
            for start in range(end - 1, -1, -1):
                total += counts[calls[start]]
                if total == len(self.given):
                    return [piece for piece in pieces if piece.call in calls[start:end]]
        return []

    def _joined(self, rule: Rule, layer: int | None, pieces: Sequence[Piece], by: Callable[[Piece], Tensor]) -> Tensor:
        """All calls of the prompt, all ranks, as our axes are."""
        by_call: dict[tuple[int, ...], dict[int, Piece]] = {}
        for piece in pieces:
            by_call.setdefault(piece.call, {}).setdefault(piece.rank, piece)
        parts, done = list[Tensor](), 0
        for call in sorted(by_call):
            part, count = self._call(rule, call, by_call[call], by), self.rows.get(call, 0)
            if rule.padded and layer is not None:
                ratio = self.config.ratio(layer)
                part = part[: (done + count) // ratio - done // ratio]
            if rule.masked and layer is not None:
                finished = torch.arange(done + 1, done + len(part) + 1, device=part.device) // self.config.ratio(layer)
                part = part.masked_fill(part >= finished[:, None], -1)
            parts.append(part)
            done += count
        if len(parts) == 1 or rule.so_far:
            return parts[-1]
        if rule.site in LAST and all(len(part) == 1 for part in parts):  # a prompt's last row, then decoded ones
            parts = parts if all(self.rows[call] == 1 for call in by_call) else parts[-1:]
        if rule.site.endswith("selected"):
            width = max(part.shape[-1] for part in parts)
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in parts]
        return torch.cat(parts)

    def _call(
        self, rule: Rule, call: tuple[int, ...], ranks: Mapping[int, Piece], by: Callable[[Piece], Tensor]
    ) -> Tensor:
        """One call: columns of each rank, ranks joined, axes in our order, then streams and factors."""
        order, parts = self._axes(rule), []
        for rank in sorted(ranks):
            x = self._unbatched(by(ranks[rank]), order, self.rows.get(call), given=bool(rule.axes))
            parts.append(x[..., self._columns(rule.columns, x.shape[-1])] if rule.columns else x)
        if rule.ranks == "same" or len(parts) == 1:
            x = parts[0]
        elif rule.ranks == "sum":
            x = torch.stack([part.float() for part in parts]).sum(0)
        else:
            at = next(n for n, axis in enumerate(order) if rule.ranks in re.split(r"[*+]", axis))
            x = torch.cat(parts, at - len(order))
        x = self._ordered(x, order) if rule.axes and not rule.columns else x
        x = x if rule.stream is None else x[:, rule.stream]
        for factor in rule.times:
            x = x.float() * self._factor(factor)
        if rule.rows_sum and x.device.type != "meta" and bool(((x.float().sum(-1) - 1).abs() < SUM_TO_1).all()):
            x = x.float() * float(getattr(self.config, rule.rows_sum))
        return x

    def _unbatched(self, x: Tensor, order: Sequence[str], rows: int | None, *, given: bool) -> Tensor:
        """Without batch axes in front; numbers without a shape get that of the table."""
        if not order:
            return x.flatten()
        if x.ndim == 1 and len(order) > 1:
            x = x.reshape([rows if axis == "t" and rows else self._size(axis) or -1 for axis in order])
        batched = not given and order[0] == "t" and rows not in (1, None)  # axes may be run together
        while x.ndim > 1 and x.shape[0] == 1 and (batched or x.ndim > len(order)):
            x = x[0]
        return x.flatten(len(order) - 1) if given and x.ndim > len(order) else x

    def _ordered(self, x: Tensor, order: Sequence[str]) -> Tensor:
        """Axes apart that were run together, rows first, axes of 1 gone."""
        if x.ndim != len(order):
            return x
        names, sizes = list[str](), list[int]()
        for axis, length in zip(order, x.shape, strict=True):
            parts = axis.split("*")
            names += parts
            sizes += [length] if len(parts) == 1 else [self._size(part) or -1 for part in parts]
        first = next((n for n, name in enumerate(names) if name in ROWS), 0)
        others = [n for n in range(len(names)) if n != first]
        x = x.reshape(sizes).permute(first, *others)
        for n in reversed([n for n, old in enumerate((first, *others)) if names[old] == "1"]):
            x = x.squeeze(n)
        return x

    def _columns(self, text: str, width: int) -> slice:
        if text in HALVES:
            return HALVES[text](width)
        low, high = (self._size(end) if end else None for end in text.split(":"))
        return slice(low, high)

    def _factor(self, text: str) -> float:
        name, _, power = text.partition("^")
        base: Any = float(name) if re.fullmatch(r"[\d.]+", name) else self.sizes[name]
        return float(base ** float(power or 1))


SUM_TO_1: Final = 0.02  # off by so much at most, in bf16
ENTRIES: Final = ("n", "e")
ROWS: Final = ("t", *ENTRIES)
SHAPES: Final = {site.name: site.shape for site in (*SITES, *STEPS)} | {TOKENS: "t", POSITIONS: "t"}
HALVES: Final[dict[str, Callable[[int], slice]]] = {
    "first half": lambda width: slice(0, width // 2),
    "second half": lambda width: slice(width // 2, width),
}


def _other_layer(rule: Rule, layer: int, count: int) -> str:
    alone = {"": True, "first": layer == 0, "not first": layer > 0, "last": layer == count - 1}
    return "" if alone[rule.layers] else f"only in the {rule.layers} layer it is {rule.site}"
