"""What the load probe says: findings, tables and summary from what was compared and watched."""

from collections import Counter
from collections.abc import Sequence

from model.checkpoint.census import Census
from model.config import LayerKind, ModelConfig
from model.transformer import Transformer
from probes.finding import JSON, Finding, Part, Table, Text, exactly, judged, measured, tripped
from probes.load.run import Ran
from probes.load.values import Compared
from probes.shared.file_bytes import FileBytes, unaccounted
from probes.shared.held import find

SHOWN = 5  # names in a finding's evidence; the count says how many there are

NOT_CLAIMED = """\
That the numbers are good ones: a checkpoint that was damaged before it was written is followed faithfully. An operand
counts whole, so a read of the embeddings or of the table of expert ids does not mean that all of its rows were needed.
Names that a file spells in another dialect are taken as the census translates them. Of a checkpoint above 256 MiB,
values are sampled (in each layer one routed expert and all else, of a large matrix 128 rows), and nothing is changed to
look for its effect."""


def census_findings(census: Census, files: FileBytes, config: ModelConfig) -> list[Finding]:
    """The census against the files' own headers, and against a count of parameters by hand."""
    extra = unaccounted(files, list(census.mappings.values()), list(census.ignored))
    moved = [name for name, bound in census.mappings.items() if name in files.places and bound.weight != name]
    return [
        judged("stored tensors that are neither used nor ignored", len(extra), exactly(0), **_some(extra)),
        judged("bytes accounted for", census.nbytes, exactly(files.data_bytes), "B"),
        judged("parameters bound", len(census.mappings), exactly(_expected(config))),
        judged("parameters bound to another tensor than the one of their name", len(moved), exactly(0), **_some(moved)),
    ]


def _expected(config: ModelConfig) -> int:
    """How many parameters the architecture has.

    Embedding, head, norm and the head's three of mHC. In each layer: 2 norms, 6 of mHC, 8 of attention, a gate and its
    bias or table, 3 matrices for each expert; 4 for each compressor, and 2 for the indexer beside its compressor.
    """
    of_kind = {LayerKind.SWA: 0, LayerKind.HCA: 4, LayerKind.CSA: 4 + 4 + 2}
    of_each = 2 + 6 + 8 + 2 + 3 * (config.n_routed_experts + 1)
    return 6 + sum(of_each + of_kind[kind] for kind in config.layer_kinds)


def value_findings(compared: Sequence[Compared], config: ModelConfig) -> list[Finding]:
    """One finding for each layer, and one for what is outside of all."""
    findings = []
    for layer in (None, *range(config.num_hidden_layers)):
        mine = [one for one in compared if _layer(one.name) == layer]
        wrong = [one for one in mine if one.differing]
        evidence: dict[str, JSON] = {"compared": sum(one.numbers for one in mine)}
        if wrong:
            evidence |= {"parameters": len(wrong)} | _some([f"{one.name} {one.first}" for one in wrong])
        differing = sum(one.differing for one in mine)
        findings.append(judged("numbers that differ from the file's", differing, exactly(0), layer=layer, **evidence))
    return findings


def run_findings(model: Transformer, names: Sequence[str], ran: Ran) -> list[Finding]:
    """What is held, read and felt."""
    absent = [name for name in names if find(model, name) is None]
    findings = [judged("parameters that no object of the model holds", len(absent), exactly(0), **_some(absent))]
    if (trip := ran.tripped) is not None:
        return [*findings, tripped(trip)]
    missed, total = ran.missed(), sum(len(counts) for counts in ran.experts.values())
    findings.append(measured("routed experts that got a token, share", 1 - len(missed) / total, **_some(missed)))
    findings.append(judged("parameters not read whole in a run", len(ran.unread), exactly(0), **_some(ran.unread)))
    if (same := ran.ineffective) is not None:
        findings.append(judged("parameters whose change changes nothing", len(same), exactly(0), **_some(same)))
    return findings


def forms(census: Census, compared: Sequence[Compared]) -> Table:
    """Parameters by the form in which they are stored, and what numpy decoded of them."""
    rows: list[list[float | str | None]] = []
    for form, tally in census.by_form.items():
        mine = [one for one in compared if census.mappings[one.name].form is form]
        numbers, wrong = sum(one.numbers for one in mine), sum(one.differing for one in mine)
        zeros = f"{sum(one.zeros for one in mine) / numbers:.2%}" if numbers else None
        largest = max((one.largest for one in mine), default=None)
        rows.append([form.value, tally.tensors, tally.elements, tally.nbytes, numbers, wrong, zeros, largest])
    columns = ("stored as", "parameters", "numbers", "bytes with scales", "compared", "differing", "zeros", "largest")
    note = "Zeros and the largest magnitude are those of the decoded numbers that were compared."
    return Table("What the parameters are stored as", columns, rows, note)


def stored(census: Census) -> Table:
    """Stored tensors by kind."""
    names = {"matrix": "linears", "bf16": "other BF16", "f32": "other F32", "i64": "expert ids", "scale": "scales"}
    rows: list[list[float | str | None]] = [
        [names.get(kind, kind), tally.tensors, tally.elements, tally.nbytes] for kind, tally in census.by_kind.items()
    ]
    rows.append(["all", census.tensors, None, census.nbytes])
    reasons = Counter(census.ignored.values())
    note = " ".join(f"Ignored, {count}: {reason}." for reason, count in reasons.items()) or "Nothing is ignored."
    return Table("What is in the files", ("kind", "tensors", "elements", "bytes"), rows, note)


def layers(config: ModelConfig, names: Sequence[str], compared: Sequence[Compared], ran: Ran) -> Table:
    """The same by layer, and the expert that got the fewest tokens."""
    rows: list[list[float | str | None]] = []
    for layer in (None, *range(config.num_hidden_layers)):
        mine = [one for one in compared if _layer(one.name) == layer]
        numbers, wrong = sum(one.numbers for one in mine), sum(one.differing for one in mine)
        count = sum(_layer(name) == layer for name in names)
        tokens = None if layer is None or ran.tripped else ran.experts[layer]
        least = None if tokens is None else f"{int(tokens.min())} (expert {int(tokens.argmin())})"
        kind = "outside of all" if layer is None else config.layer_kind(layer).name
        rows.append([layer, kind, count, numbers, wrong, least])
    columns = ("layer", "kind", "parameters", "numbers compared", "differing", "fewest tokens of an expert")
    return Table("Layer by layer", columns, rows)


def not_reached(ran: Ran) -> tuple[Part, ...]:
    """The experts that got no token, by name, where there are some."""
    missed = [] if ran.tripped else ran.missed()
    if not missed:
        return ()
    shown = ", ".join(missed[:20]) + ", ..." * (len(missed) > 20)
    text = f"{len(missed)}, which were run by themselves; what changing them changes was not asked: {shown}."
    return (Text("Experts that got no token", text),)


def summary(census: Census, compared: Sequence[Compared], ran: Ran) -> str:
    """The numbers that matter."""
    numbers, wrong = sum(one.numbers for one in compared), sum(one.differing for one in compared)
    said = f"{wrong:,} of {numbers:,} numbers in {len(compared)} parameters differ from the file's bytes"
    if ran.tripped is not None:
        return f"{said}; then a tripwire ended the run: {ran.tripped}."
    said += f"; {len(ran.unread)} of {len(census.mappings)} parameters were not read in a forward pass"
    if ran.ineffective is not None:
        said += f", and {len(ran.ineffective)} can be changed without changing anything"
    return said + "."


def _layer(name: str) -> int | None:
    """The layer of a parameter; None outside of all layers."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def _some(names: Sequence[str]) -> dict[str, JSON]:
    return {"first": list(names[:SHOWN])} if names else {}
