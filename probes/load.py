"""Load: whether the model computes with what the checkpoint's files hold, all of it."""

import copy
import json
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fathom.kernels import compiled
from fathom.kernels.formats.stored import Dense
from fathom.kernels.ops import Ops
from fathom.model.call import Call
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.tensor_mapping import TensorMapping
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Site
from fathom.model.transformer import Transformer
from fathom.probes.finding import JSON, Finding, Part, Report, Table, Text, exactly, judged, measured, some, tripped
from fathom.probes.judge.oracle import F64, decoded
from fathom.probes.probe import Probe, Progress, one_rank
from fathom.probes.shared.held import Held, Value, find, used
from fathom.probes.subject import Subject, run_tokens, selects_all

WHOLE: Final = 256 << 20  # bytes of tensor data up to which every number is compared
ROWS: Final = 128  # rows of a matrix compared beyond that: one row of FP8 blocks
TILE: Final = 1 << 22  # numbers decoded at once: 32 MiB of fp64


# --- values: every number that the model computes with, against the same number built from the file's bytes


class Files:
    """The tensors of a checkpoint directory as the safetensors library reads them, and the numbers they stand for.

    Nothing of `model.checkpoint` or the kernels reads or decodes here. It is not careful with hostile files; the census
    was, before this runs.
    """

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        shards = ["model.safetensors"]
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        self.shards: dict[str, Any] = {}  # by stored name: the open file
        self.data_bytes = 0  # of all files, without their headers
        for path in (directory / shard for shard in shards):
            with path.open("rb") as file:
                self.data_bytes += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
            opened: Any = safe_open(path, framework="pt")
            self.shards |= dict.fromkeys(opened.keys(), opened)

    def numbers(self, mapping: TensorMapping, start: int, stop: int) -> Tensor:
        """Rows `start` (of FP8, a multiple of its block) to `stop` of a parameter, float64; of a vector, values."""
        stored = self.shards[mapping.weight].get_slice(mapping.weight)
        if (part := mapping.part) is not None:
            data = stored[part.expert : part.expert + 1, part.start + start : part.start + stop][0]
        else:
            data = stored[start:stop]
        scale = overall = None
        if mapping.scale is not None:
            tall = mapping.block or 1
            scale = self.shards[mapping.scale].get_slice(mapping.scale)[start // tall : -(-stop // tall)]
        if mapping.global_scale is not None:
            overall = self.shards[mapping.global_scale].get_tensor(mapping.global_scale)
        return decoded(mapping.form, data, scale, overall, mapping.block)


@dataclass(slots=True)
class Compared:
    """What became of one parameter."""

    name: str
    numbers: int = 0  # compared
    differing: int = 0
    zeros: int = 0  # in the file, of those compared
    largest: float = 0.0  # magnitude in the file, of those compared
    first: str = ""  # the first number that differs

    @property
    def layer(self) -> int | None:
        """Its layer; None outside of all layers."""
        return layer_of(self.name)

    def add(self, filed: Tensor, held: Held, model: Transformer, low: int, high: int) -> None:
        """Compare rows `low` to `high`, which hold `filed`."""
        self.numbers += filed.numel()
        self.zeros += int((filed == 0).sum())
        self.largest = max(self.largest, float(filed.abs().max()))
        wanted = filed.float()  # the one rounding there is, of products with an fp32 scale
        for column, found in used(model.arithmetic.ops, held, model.config.o_groups, low, high):
            part = wanted if wanted.ndim == 1 else wanted[:, column : column + found.shape[1]]
            if found.shape != part.shape:
                self.differing += part.numel()
                self.first = f"{list(found.shape)} numbers, the file holds {list(part.shape)}"
                continue
            wrong = ~(found.cpu().to(F64) == part.to(F64))  # a NaN is a fault, in the file as in the model
            if wrong.any() and not self.first:
                place = tuple(wrong.nonzero()[0].tolist())
                shown = [place[0] + low, *(axis + column for axis in place[1:])]
                self.first = f"{shown} is {float(found[place]):.6g}, the file holds {float(part[place]):.6g}"
            self.differing += int(wrong.sum())


def of_images(name: str) -> bool:
    """Whether a parameter of V4.1 is of tokens that stand for parts of an image: no run of text reads it."""
    return name.endswith("bias_vl")


def layer_of(name: str) -> int | None:
    """The layer of a parameter; None outside of all layers."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def _expert(name: str) -> int | None:
    """The routed expert that a parameter belongs to."""
    return int(name.split(".")[4]) if ".experts." in name else None  # layers, 3, ffn, experts, 17, w1, weight


def _drawn(key: str, count: int) -> int:
    return random.Random(key).randrange(count)  # noqa: S311 -- a sample, not a secret


def sample(names: Sequence[str], files: Files, experts: int, seed: int) -> list[str]:
    """The parameters to compare: all of a small checkpoint; of a large one, one routed expert a layer and the rest."""
    if files.data_bytes <= WHOLE:
        return list(names)
    return [
        name
        for name in names
        if (expert := _expert(name)) is None or expert == _drawn(f"{seed} {layer_of(name)}", experts)
    ]


def compare(model: Transformer, census: Census, files: Files, names: Sequence[str], seed: int) -> Iterator[Compared]:
    """Compare those parameters that the model holds.

    Whole, but for matrices of a large checkpoint: of these, `ROWS` rows drawn at random.
    """
    for name in names:
        held, (height, *width) = find(model, name), census.demanded[name].shape
        if held is None:
            continue
        step, first, last = max(ROWS, TILE // (width or [1])[0] // ROWS * ROWS), 0, height
        if files.data_bytes > WHOLE and height > step:
            step, first = ROWS, ROWS * _drawn(f"{seed} {name}", -(-height // ROWS))
            last = min(height, first + ROWS)
        compared = Compared(name)
        for low in range(first, last, step):
            high = min(low + step, last)
            compared.add(files.numbers(census.mappings[name], low, high), held, model, low, high)
        yield compared


# --- reads: which bytes of the model's tensors a run reads, watched from outside

# Calls that ask for the shape or the dtype of a tensor and not for what is in it.
_METADATA = {
    "__get__",
    "__len__",
    "dim",
    "numel",
    "size",
    "stride",
    "data_ptr",
    "untyped_storage",
    "storage_offset",
    "element_size",
    "is_contiguous",
    "numpy",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_full",
}


class Reads(TorchFunctionMode):
    """Inside the ``with``, note the bytes of watched tensors that are operands of torch's functions.

    A call whose result lies in the operand's own memory is a view and reads nothing; what is done with the view does.
    An operand counts whole, from its first byte to its last: a row gathered from a table is a read of the table.

    Parameters
    ----------
    watched
        Tensors by a name; contiguous, and none of them may be freed while this lives.

    """

    def __init__(self, watched: Mapping[str, Tensor]) -> None:
        super().__init__()
        order = sorted(watched, key=lambda name: watched[name].data_ptr())
        self._names, self._starts = order, [watched[name].data_ptr() for name in order]
        self._nbytes = {name: watched[name].nbytes for name in order}
        self._ranges: dict[str, set[tuple[int, int]]] = {name: set() for name in order}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make the call, and note what it read."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.__name__ not in _METADATA:
            mine = {tensor.untyped_storage().data_ptr() for tensor in _tensors(result)}
            for operand in _tensors((args, *kwargs.values())):
                if operand.untyped_storage().data_ptr() not in mine:
                    self.note(operand.data_ptr(), compiled.reach(operand))
        return result

    def note(self, start: int, nbytes: int) -> None:
        """Note that bytes from an address on were read: what loops and launches do, torch's functions cannot show."""
        for i in range(max(0, bisect_right(self._starts, start) - 1), len(self._names)):
            name, low, high = self._names[i], start - self._starts[i], start - self._starts[i] + nbytes
            if high <= 0:
                return
            if low < self._nbytes[name]:
                self._ranges[name].add((max(low, 0), min(high, self._nbytes[name])))

    def share(self, name: str) -> float:
        """How much of a watched tensor was read, 0 .. 1."""
        read, end = 0, 0
        for low, high in sorted(self._ranges[name]):
            read += max(0, high - max(low, end))
            end = max(end, high)
        return read / self._nbytes[name]


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in arguments or results, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


@dataclass(slots=True)
class Ran:
    """What a forward pass did with the parameters."""

    experts: dict[int, Tensor] = field(default_factory=dict)  # layer -> tokens that each expert got
    unread: list[str] = field(default_factory=list)  # parameters, with the share that was read
    ineffective: list[str] | None = None  # None: not asked
    tripped: Tripwire | None = None  # what ended it

    def missed(self) -> list[str]:
        """Experts that got no token of the prompt."""
        return [
            f"layers.{layer}.ffn.experts.{expert}"
            for layer, counts in sorted(self.experts.items())
            for expert in (counts == 0).nonzero()[:, 0].tolist()
        ]

    def reached(self, name: str) -> bool:
        """Whether a run of the prompt needs a parameter: anything but a routed expert that no token went to."""
        layer, expert = layer_of(name), _expert(name)
        return layer is None or expert is None or int(self.experts[layer][expert]) > 0


def reading(ops: Ops) -> Callable[[compiled.Reader], AbstractContextManager[None]]:
    """What tells of the memory that an op set's own code is given, beside torch's functions."""
    if ops.name != "triton":
        return compiled.reading
    from fathom.kernels import triton_ops  # noqa: PLC0415 (Triton is not on every platform)

    return triton_ops.reading


@torch.inference_mode()
def watch(model: Transformer, names: Sequence[str], tokens: list[int], chunk: int, ran: Ran) -> None:
    """Run the prompt, and note in `ran` what is read and how many tokens each expert gets.

    Experts that get none are then run by themselves, on one that others got.
    """
    inputs: dict[int | None, Tensor] = {}

    def ids(layer: int | None, chosen: Tensor) -> None:
        assert layer is not None
        counts = torch.bincount(chosen.flatten().cpu(), minlength=model.config.n_routed_experts)
        ran.experts[layer] = ran.experts.get(layer, 0) + counts

    places = {name: held for name in names if (held := find(model, name)) is not None}
    watched = {f"{name} {i}": part for name, held in places.items() for i, part in enumerate(held.tensors())}
    listeners = {sites.EXPERTS_INPUT: lambda layer, x: inputs.update({layer: x[:1].clone()}), sites.EXPERT_IDS: ids}
    with listening(model, listeners), Reads(watched) as reads, reading(model.arithmetic.ops)(reads.note):
        model.logits(run_tokens(model, tokens, chunk)[0][-1:])
        for layer, counts in ran.experts.items():
            for expert in (counts == 0).nonzero()[:, 0].tolist():
                model.blocks[layer].experts.experts[expert](inputs[layer])
    shares = {name: min(reads.share(f"{name} {i}") for i in range(len(places[name].tensors()))) for name in places}
    ran.unread += [f"{name} ({share:.0%} read)" for name, share in shares.items() if share < 1]


# --- effects: which parameters change nothing when they are changed, a stronger question than whether they are read


def without_effect(
    model: Transformer, names: Sequence[str], tokens: list[int], chunk: int, seed: int
) -> Iterator[tuple[str, bool]]:
    """Change each parameter in turn, and compare bit by bit.

    A parameter of a layer is changed alone, and the layer runs again on what it got in an unchanged run of all tokens
    in one call. A parameter outside of the layers is judged by the logits of the last token of a whole run. A tripwire
    that goes off is an effect too. Every parameter is put back.

    Yields
    ------
    tuple[str, bool]
        A name, and whether its change changed nothing.

    """
    generator = torch.Generator().manual_seed(seed)

    def run(layer: int | None) -> list[Tensor]:
        if layer is None:
            return [model.logits(run_tokens(model, tokens, chunk)[0][-1:])]
        return entered[layer].again()

    with torch.inference_mode():
        with entering(model) as entered:
            run_tokens(model, tokens, len(tokens))
        for layer in (*range(len(model.blocks)), None):
            before = run(layer)
            for name in (name for name in names if layer_of(name) == layer):
                if (held := find(model, name)) is not None:
                    yield name, _same(held, partial(run, layer), before, generator)


class Entered:
    """A layer, by what runs it; it runs as it did, and once more on the same."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *given: Any) -> Any:
        """Keep what the layer is given, and run it."""
        self.given = self._copied(given)
        return self.forward(*given)

    run = __call__  # as layers of V4.1 are called

    def again(self) -> list[Tensor]:
        """What it leaves to the next layer, of the same."""
        return list(_tensors([self(*self.given)]))

    @staticmethod
    def _copied(given: tuple[Any, Call, Any]) -> tuple[Any, Call, Any]:
        passed, call, cache = given
        call = copy.copy(call)
        call.selected = dict(call.selected)
        return passed, call, copy.deepcopy(cache)


@contextmanager
def entering(model: Transformer) -> Iterator[list[Entered]]:
    """Inside the ``with``, every layer keeps what it is given."""
    blocks: Any = model.blocks
    entered: Any = [Entered(block if model.config.v41 is None else block.run) for block in blocks]
    model.blocks = entered
    try:
        yield entered
    finally:
        model.blocks = blocks


def _same(held: Held, run: Callable[[], list[Tensor]], before: list[Tensor], generator: torch.Generator) -> bool:
    value = held.value
    held.put(_another(value, generator))
    try:
        return all(map(torch.equal, run(), before))
    except Tripwire:
        return False
    finally:
        held.put(value)


def _another(value: Value, generator: torch.Generator) -> Value:
    """Other numbers of the same form: rows in another order where numbers are packed, else noise of their own size."""
    if isinstance(value, Dense):
        return Dense(_noisy(value.data, generator))
    if not isinstance(value, Tensor):
        bits = value.data.view(torch.uint8)
        return value._replace(data=bits.roll(1, 0).view(value.data.dtype))
    return _noisy(value, generator) if value.is_floating_point() else value.roll(1, 0)


def _noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator).to(x.device)
    return (x + noise * x.float().abs().mean().clamp(min=1)).to(x.dtype)


# --- the probe


@dataclass(frozen=True)
class Load(Probe):
    """Follow every number from the file to the op that multiplies with it."""

    name: ClassVar[str] = "load"
    question: ClassVar[str] = "Does the model compute with what the files hold: all of it, and nothing else?"
    reads: ClassVar[tuple[Site, ...]] = (sites.EXPERTS_INPUT, sites.EXPERT_IDS)
    background: ClassVar[str] = """\
A checkpoint is a list of named tensors, and a loader that does not find a name is usually told not to mind. The model
then runs with zeros, with noise, or with what the memory held, at full speed and often fluently: a V4 runtime lost its
indexer for months that way. The other half is decoding. Matrices are stored as 8-bit or 4-bit numbers with a scale for
each block, two of the 4-bit ones in a byte. Take these in the wrong order, or the scale of the block beside, and every
number still has the right size.

So this page follows each number all the way. The **census** says what each stored tensor is. **Values**: the files are
read again by the safetensors library and every number is built from its bits by the oracle, with none of the
runtime's code; the model's own linear op
multiplies each matrix by the identity, and the two must be the same number. **Reads**: in a forward pass every call of
torch, every compiled loop and every launch of a kernel is watched, and every byte of every parameter must have been an
operand; an expert that no token went to is given one. **Effects**: each parameter is changed in
turn, and its layer's output must change with it, because what is read may still be thrown away."""
    noticed: ClassVar[str] = """\
Statistics of the weights would not have shown the two classic faults of decoding. Swap the nibbles, and nearly all FP4
numbers are others, yet every block still holds the numbers that it held, in another order: same histogram, same norm,
same largest. Shift the scales by one block, and most numbers stay right, because neighbours often share a scale; a
matrix of a single block cannot tell at all. Only number by number against the file did both show at once.

Watching reads found more than it was built for. With every rank on the first rank's sinks all values held are right and
every parameter is an operand, but a part of each sink vector is never read. That is why a parameter must be read whole.

A table of expert ids that is all zeros is right wherever the file's is zero (its row in the table of what parameters
are stored as has the share): a spot check may well be content."""

    of_v41: ClassVar[bool] = True
    tokens: int = 256  # of the prompt, at least
    effects: bool = True  # whether each parameter is also changed: 210 runs of one layer in the demo

    def needs(self, subject: Subject) -> str | None:
        """All weights in one process."""
        return one_rank(subject, "it takes weights out of the model, and a rank holds only its part of them")

    def vacuous(self, subject: Subject) -> str | None:
        """A compressor's norm is not read before a window closes; an indexer that selects all has no effect."""
        config, count = subject.config, self._count(subject.config)
        if count < (ratio := max(config.compress_ratios)):
            return f"in {count} tokens no window of {ratio} closes"
        if self.effects and count // 2 < selects_all(config):
            return f"in {count} tokens the indexer has no choice, or hardly one: it selects {config.index_topk} entries"
        return None

    def _count(self, config: ModelConfig) -> int:
        """Tokens of the prompt: twice as many entries as are selected, where effects are asked for."""
        wanted = max(self.tokens, *config.compress_ratios, 2 * selects_all(config) * self.effects)
        return min(wanted, config.max_position_embeddings)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Census, values, reads, effects: what needs no run comes first."""
        loaded, config = subject.load(), subject.config
        census, names, files = loaded.census, list(loaded.census.mappings), Files(subject.directory)
        chosen, compared = sample(names, files, config.n_routed_experts, subject.seed), list[Compared]()
        for one in compare(loaded.model, census, files, chosen, subject.seed):
            compared.append(one)
            progress(0.2 * len(compared) / len(chosen), f"values of {one.name}")
        ran = self._run(subject, names, files, progress)
        progress(1.0, "done")
        findings = (
            *census_findings(census, files, config),
            *value_findings(compared, config),
            *run_findings(loaded.model, names, ran),
        )
        parts = (*tables(census, compared), layers(config, names, compared, ran), *not_reached(ran))
        return Report(summary(census, compared, ran), findings, parts, NOT_CLAIMED)

    def _run(self, subject: Subject, names: Sequence[str], files: Files, progress: Progress) -> Ran:
        """Reads and effects. A tripwire ends them and not the probe: what was compared before says more than it."""
        ran, model, chunk = Ran(), subject.model, subject.options.prefill_chunk
        tokens, names = subject.tokens(self._count(subject.config)), [name for name in names if not of_images(name)]
        progress(0.2, f"a prompt of {len(tokens)} tokens, watched")
        try:
            watch(model, names, tokens, chunk, ran)
            if self.effects and files.data_bytes <= WHOLE:
                asked = [name for name in names if ran.reached(name)]
                ran.ineffective = []
                for done, (name, same) in enumerate(without_effect(model, asked, tokens, chunk, subject.seed)):
                    ran.ineffective += [name] if same else []
                    progress(0.3 + 0.7 * done / len(asked), f"{name} changed")
        except Tripwire as trip:
            ran.tripped = trip
        return ran


# --- findings


def _none(what: str, names: Sequence[str]) -> Finding:
    """Judge that there is none of something."""
    return judged(what, len(names), exactly(0), **some(names))


def census_findings(census: Census, files: Files, config: ModelConfig) -> Iterator[Finding]:
    """The census against the files' own headers, and against a count of parameters by hand."""
    mapped = {name for bound in census.mappings.values() for name in (bound.weight, bound.scale, bound.global_scale)}
    extra = sorted(files.shards.keys() - mapped - set(census.ignored))
    moved = [name for name, bound in census.mappings.items() if name in files.shards and bound.weight != name]
    yield _none("stored tensors that are neither used nor ignored", extra)
    yield judged("bytes accounted for", census.nbytes, exactly(files.data_bytes), "B")
    yield judged("parameters bound", len(census.mappings), exactly(_expected(config)))
    yield _none("parameters bound to another tensor than the one of their name", moved)


def _expected(config: ModelConfig) -> int:
    """How many parameters the architecture has.

    Embedding, head, norm and the head's three of mHC. In each layer: 2 norms, 6 of mHC, 8 of attention, a gate and its
    bias or table, 3 matrices for each expert; 4 for each compressor, and 2 for the indexer beside its compressor.

    V4.1 has no mHC at its head and in each layer a bias more, of images. A compressor has 2 parameters, and a gate
    where it pools; its index keys have 2, and n-grams 4.
    """
    of_each = 2 + 6 + 8 + 2 + 3 * (config.n_routed_experts + 1)
    if config.v41 is None:
        of_kind = {LayerKind.SWA: 0, LayerKind.HCA: 4, LayerKind.CSA: 4 + 4 + 2}
        return 6 + sum(of_each + of_kind[kind] for kind in config.layer_kinds)
    layers = range(config.num_hidden_layers)
    made = sum(2 + (config.ratio(layer) > 1) + 2 for layer in layers if config.makes_entries(layer))
    selecting, grams = 2 * sum(map(config.selects, layers)), 4 * len(config.v41.engram.layer_ids)
    return 3 + (of_each + 1) * len(layers) + made + selecting + grams


def value_findings(compared: Sequence[Compared], config: ModelConfig) -> Iterator[Finding]:
    """One finding for each layer, and one for what is outside of all."""
    for layer in (None, *range(config.num_hidden_layers)):
        own = [one for one in compared if one.layer == layer]
        wrong = [f"{one.name} {one.first}" for one in own if one.differing]
        evidence: dict[str, JSON] = {"compared": sum(one.numbers for one in own)}
        evidence |= {"parameters": len(wrong)} | some(wrong) if wrong else {}
        differing = sum(one.differing for one in own)
        yield judged("numbers that differ from the file's", differing, exactly(0), layer=layer, **evidence)


def run_findings(model: Transformer, names: Sequence[str], ran: Ran) -> Iterator[Finding]:
    """What is held, read and felt."""
    absent = [name for name in names if find(model, name) is None]
    yield _none("parameters that no object of the model holds", absent)
    if ran.tripped is not None:
        yield tripped(ran.tripped)
        return
    missed, total = ran.missed(), sum(len(counts) for counts in ran.experts.values())
    yield measured("routed experts that got a token, share", 1 - len(missed) / total, **some(missed))
    yield _none("parameters not read whole in a run", ran.unread)
    if ran.ineffective is not None:
        yield _none("parameters whose change changes nothing", ran.ineffective)


# --- the summary and tables


def tables(census: Census, compared: Sequence[Compared]) -> Iterator[Table]:
    """Parameters by the form in which they are stored, with what the oracle decoded of them; stored tensors by kind."""
    rows: list[list[float | str | None]] = []
    for form, tally in census.by_form.items():
        own = [one for one in compared if census.mappings[one.name].form is form]
        numbers, wrong = sum(one.numbers for one in own), sum(one.differing for one in own)
        zeros = f"{sum(one.zeros for one in own) / numbers:.2%}" if numbers else None
        largest = max((one.largest for one in own), default=None)
        rows.append([form.value, tally.tensors, tally.elements, tally.nbytes, numbers, wrong, zeros, largest])
    columns = ("stored as", "parameters", "numbers", "bytes with scales", "compared", "differing", "zeros", "largest")
    note = "Zeros and the largest magnitude are those of the decoded numbers that were compared."
    yield Table("What the parameters are stored as", columns, rows, note)
    names = {"matrix": "linears", "bf16": "other BF16", "f32": "other F32", "i64": "expert ids", "scale": "scales"}
    rows = [[names.get(kind, kind), of.tensors, of.elements, of.nbytes] for kind, of in census.by_kind.items()]
    rows.append(["all", census.tensors, None, census.nbytes])
    reasons = Counter(census.ignored.values())
    note = " ".join(f"Ignored, {count}: {reason}." for reason, count in reasons.items()) or "Nothing is ignored."
    yield Table("What is in the files", ("kind", "tensors", "elements", "bytes"), rows, note)


def layers(config: ModelConfig, names: Sequence[str], compared: Sequence[Compared], ran: Ran) -> Table:
    """The same by layer, and the expert that got the fewest tokens."""
    rows: list[list[float | str | None]] = []
    for layer in (None, *range(config.num_hidden_layers)):
        own = [one for one in compared if one.layer == layer]
        numbers, wrong = sum(one.numbers for one in own), sum(one.differing for one in own)
        tokens = None if layer is None or ran.tripped else ran.experts[layer]
        least = None if tokens is None else f"{int(tokens.min())} (expert {int(tokens.argmin())})"
        kind = "outside of all" if layer is None else config.layer_kind(layer).name
        rows.append([layer, kind, sum(layer_of(name) == layer for name in names), numbers, wrong, least])
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
    told = f"{wrong:,} of {numbers:,} numbers in {len(compared)} parameters differ from the file's bytes"
    if ran.tripped is not None:
        return f"{told}; then a tripwire ended the run: {ran.tripped}."
    told += f"; a forward pass does not read {len(ran.unread)} of {len(census.mappings)} parameters"
    if ran.ineffective is not None:
        told += f"; {len(ran.ineffective)} parameters can be changed without an effect on the output"
    return told + "."


NOT_CLAIMED = """\
That the numbers are good ones: a checkpoint that was damaged before it was written is followed faithfully. An operand
counts whole, so a read of the embeddings or of the table of expert ids does not mean that all of its rows were needed;
a Triton kernel is handed the matrices of all experts of a layer at once, so that whether it reads each of them is not
seen but in what changing them changes.
Names that a file spells in another dialect are taken as the census translates them. Of a checkpoint above 256 MiB,
values are sampled (in each layer one routed expert and all else, of a large matrix 128 rows), and nothing is changed to
look for its effect."""

FULL = Load()
QUICK = Load(effects=False)
