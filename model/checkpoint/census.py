"""Every stored tensor is bound to one parameter or ignored for a reason, and every parameter is filled; else an error.

The census needs names, dtypes and shapes only, so it runs on a bare list of them as well as on an opened checkpoint.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from fathom.model.checkpoint.config_fields import DSPARK
from fathom.model.checkpoint.header import ITEM_BYTES
from fathom.model.checkpoint.mtp import (
    COPIES,
    NOT_RUN,
    FoundHead,
    Head,
    contradiction,
    copied,
    found_head,
    head_parameters,
    stage_and_rest,
)
from fathom.model.checkpoint.mtp import meaning as meaning_in_head
from fathom.model.checkpoint.names import (
    INPUT_SCALE_REASON,
    Meaning,
    Parameter,
    Role,
    expert_name,
    ignored,
    layer_and_rest,
    parameters,
    spellings_near,
    translate,
    vision_tensors,
)
from fathom.model.checkpoint.tensor_mapping import Form, Slice, Source, Stored, TensorMapping, Wrong, map_parameter
from fathom.model.config import ModelConfig
from fathom.model.errors import CheckpointError, did_you_mean, quoted

VISION: Final = "vision: the image tower; text alone is run and judged"
UNKNOWN: Final = "unknown name"
NAMES_IN_MESSAGE: Final = 20  # of each kind of fault; the count says how many there are


@dataclass(slots=True)
class Tally:
    """A count of tensors."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0

    def add(self, elements: int, nbytes: int) -> None:
        """Count one more."""
        self.tensors += 1
        self.elements += elements
        self.nbytes += nbytes


@dataclass(frozen=True)
class Census:
    """What a checkpoint holds, all of it accounted for."""

    tensors: int  # stored, ignored ones included
    nbytes: int  # of their data
    weights: int  # single numbers in all parameters, FP4's counted one by one, scales not counted
    mappings: Mapping[str, TensorMapping]  # by parameter, official name
    demanded: Mapping[str, Parameter]  # the same keys: shape and kind
    ignored: Mapping[str, str]  # stored name -> reason
    by_dtype: Mapping[str, Tally]  # stored tensors and stored elements
    by_kind: Mapping[str, Tally]  # the same tensors as matrix, bf16, f32, i64, scale, ignored
    by_form: Mapping[Form, Tally]  # parameters, their weights, and their bytes with scales
    mtp_stages: int  # drafting stages
    mtp_head: Head | None  # whose they are
    head: Head | None  # the same, where it is a part of the model
    absent: Mapping[str, str]  # parameter -> stored name, of those that are not bound since their file is not there

    @cached_property
    def alike(self) -> Mapping[str, int]:
        """Parameters that differ in nothing but their layer: the first of them by name, and how many there are."""
        found: dict[tuple[str, Parameter, Form], list[str]] = {}
        for name, mapping in self.mappings.items():
            within = layer_and_rest(name)
            like = name if within is None else f"layers.{within[1]}"
            found.setdefault((like, self.demanded[name], mapping.form), []).append(name)
        return {names[0]: len(names) for names in found.values()}

    @cached_property
    def forms_of_layers(self) -> Mapping[int, Collection[tuple[str, Form]]]:
        """By layer: its parameters without their expert's number, each with its form."""
        found: dict[int, set[tuple[str, Form]]] = {}
        for name, mapping in self.mappings.items():
            if within := layer_and_rest(name):
                layer, part = within
                found.setdefault(layer, set()).add((part.rpartition("experts.")[2].lstrip("0123456789"), mapping.form))
        return {layer: frozenset(forms) for layer, forms in found.items()}


@dataclass(slots=True)
class Faults:
    """Everything that is wrong, by kind, so that one message tells all of it."""

    groups: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)  # names that mean nothing

    def add(self, kind: str, text: str) -> None:
        """Note one more."""
        self.groups.setdefault(kind, []).append(text)

    def add_unknown(self, stored: str) -> None:
        """Note one more name that means nothing."""
        self.add(UNKNOWN, quoted(stored))
        self.unknown.append(stored)

    def check(self, where: str, meant: Callable[[str], str]) -> None:
        """Raise CheckpointError for all that was noted, a line for each kind; nothing where nothing was.

        `meant` says what follows an unknown name: the missing one that it is nearly, or nothing.
        """
        for at, stored in enumerate(self.unknown[:NAMES_IN_MESSAGE]):
            self.groups[UNKNOWN][at] += meant(stored)
        lines = [
            f"{kind} ({len(texts)}): {'; '.join(texts[:NAMES_IN_MESSAGE])}{'; ...' * (len(texts) > NAMES_IN_MESSAGE)}"
            for kind, texts in self.groups.items()
        ]
        if lines:
            raise CheckpointError((f"{where}: " if where else "") + "\n".join(lines))


def census(
    tensors: Mapping[str, Stored],
    config: ModelConfig,
    where: str = "",
    absent: Collection[str] = (),
    *,
    head: bool = False,
) -> Census:
    """Account for every tensor of a checkpoint.

    Parameters
    ----------
    tensors : Mapping[str, tuple[str, Sequence[int]]]
        Stored name -> dtype as safetensors writes it, and shape.
    config : ModelConfig
        What the checkpoint must fill.
    where : str
        What messages call the checkpoint, usually its path; may be empty.
    absent : Collection[str]
        Stored names that an index has for files that are not there: each must be a parameter's too, which then is not
        bound.
    head : bool
        Whether a draft head, where there is one, is a part of the model; else it is ignored, once its names are
        known to be a head's.

    Raises
    ------
    CheckpointError
        With one line for each kind of fault (unknown name, missing, duplicate, misshapen, wrong type, scales, drafting
        head), the number of its tensors, and the first of their names.
    """
    demanded = parameters(config)
    faults = Faults()
    skipped: dict[str, str] = {}
    drafts = _drafting([*tensors, *absent], config, faults, skipped, bound=head)
    _skip_vision(tensors, absent, config, faults, skipped)
    if drafts.bound and drafts.head is not None:
        demanded |= head_parameters(drafts.head, config)
    sources = _sort(tensors, demanded, config, faults, skipped)
    elsewhere = _elsewhere(absent, sources, demanded, config, faults, skipped)
    mappings: dict[str, TensorMapping] = {}
    for name, parameter in demanded.items():
        if name in elsewhere:
            continue
        try:
            mappings[name] = map_parameter(name, parameter, sources.get(name, {}), tensors, config.fp8_block)
        except Wrong as wrong:
            faults.add(wrong.kind, wrong.text)
    _skip_input_scales(sources, mappings, faults, skipped)
    lacking = demanded.keys() - mappings.keys()
    faults.check(where, lambda stored: did_you_mean(stored, _unfilled(stored, lacking, sources)))
    return count(tensors, demanded, mappings, skipped, drafts, elsewhere)


def _unfilled(stored: str, lacking: Collection[str], sources: Mapping[str, Mapping[Role, Source]]) -> Iterator[str]:
    """Names that an unknown one might be meant for, in every dialect: what is missing of `lacking` parameters."""
    for name, meaning in spellings_near(stored):
        if meaning.parameter in lacking and meaning.role not in sources.get(meaning.parameter, {}):
            yield name


def _drafting(
    tensors: Iterable[str], config: ModelConfig, faults: Faults, skipped: dict[str, str], *, bound: bool
) -> FoundHead:
    """The draft head that `mtp.*` tensors must be one of; they are ignored where it is not `bound`."""
    names = {stored: place for stored in tensors if (place := stage_and_rest(stored))}
    head = found_head(names, config)
    if bound and head.head is Head.DSPARK and head.fault is None:
        lacks = f"{Head.DSPARK}, and config.json lacks some of {', '.join(DSPARK)}"
        head = replace(head, fault=lacks if config.dspark is None else contradiction(config.dspark, config))
    for stored in names:
        if stored in head.unexpected:
            faults.add_unknown(stored)
        if copied(stored):
            skipped[stored] = COPIES
        elif not bound or stored in head.unexpected or head.fault:
            skipped[stored] = NOT_RUN
    if head.fault:
        faults.add("draft head", head.fault)
    return replace(head, bound=bound and head.head is not None and head.fault is None)


def _skip_vision(
    tensors: Mapping[str, Stored],
    absent: Collection[str],
    config: ModelConfig,
    faults: Faults,
    skipped: dict[str, str],
) -> None:
    """Ignore V4.1's image tower, once all of it is known to be there."""
    for name, shape in vision_tensors(config).items():
        if name not in tensors and name not in absent:
            faults.add("missing", name)
        elif name in tensors and tensors[name] != ("BF16", shape):
            dtype, found = tensors[name]
            faults.add("misshapen", f"{quoted(name)} is {dtype} {list(found)}, want BF16 {list(shape)}")
        skipped[name] = VISION


def _meaning(stored: str) -> Meaning | None:
    """What a stored name means, in the model or in a draft head."""
    return translate(stored) or meaning_in_head(stored)


def _sort(
    tensors: Mapping[str, Stored],
    demanded: Mapping[str, Parameter],
    config: ModelConfig,
    faults: Faults,
    skipped: dict[str, str],
) -> dict[str, dict[Role, Source]]:
    """Each stored tensor to its parameter and role; what has none is ignored for a reason or a fault."""
    sources: dict[str, dict[Role, Source]] = {}
    for stored, (dtype, shape) in tensors.items():
        if dtype not in ITEM_BYTES:
            faults.add("unknown dtype", f"{quoted(stored)} is {quoted(dtype)}")
            continue
        if stored in skipped:
            continue
        if reason := ignored(stored, config):
            skipped[stored] = reason
            continue
        readings = _readings(stored, shape, _meaning(stored), config, faults)
        for meaning, part in readings:
            if meaning.parameter not in demanded:
                faults.add("not in this architecture", quoted(stored))
                break
            roles = sources.setdefault(meaning.parameter, {})
            if meaning.role in roles:
                faults.add("duplicate", f"{quoted(stored)} and {quoted(roles[meaning.role].name)}")
            roles[meaning.role] = Source(stored, part)
    return sources


def _elsewhere(
    absent: Collection[str],
    sources: Mapping[str, Mapping[Role, Source]],
    demanded: Mapping[str, Parameter],
    config: ModelConfig,
    faults: Faults,
    skipped: Mapping[str, str],
) -> dict[str, str]:
    """Parameters that an absent tensor belongs to, and its stored name."""
    found: dict[str, str] = {}
    taken: dict[tuple[str, Role], str] = {}
    for stored in absent:
        if stored in skipped or ignored(stored, config):
            continue
        for meaning, _ in _readings(stored, None, _meaning(stored), config, faults):
            if meaning.parameter not in demanded:
                faults.add("not in this architecture", quoted(stored))
                break
            held = sources.get(meaning.parameter, {}).get(meaning.role)
            other = held.name if held else taken.get((meaning.parameter, meaning.role))
            if other is not None:
                faults.add("duplicate", f"{quoted(stored)} and {quoted(other)}")
            taken[meaning.parameter, meaning.role] = stored
            found.setdefault(meaning.parameter, stored)
    return found


def _readings(
    stored: str, shape: Sequence[int] | None, meaning: Meaning | None, config: ModelConfig, faults: Faults
) -> list[tuple[Meaning, Slice | None]]:
    """The parameters that a stored tensor holds: one, or all experts of a layer where it is a stack.

    The shape of one that is not there is not known: None.
    """
    if meaning is None:
        faults.add_unknown(stored)
        return []
    if meaning.role not in (Role.STACKED_GATE_UP, Role.STACKED_DOWN):
        return [(meaning, None)]
    prefix = meaning.parameter.removesuffix(".ffn.experts")
    E, D, I = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    gate_up = meaning.role is Role.STACKED_GATE_UP
    want = (E, 2 * I, D) if gate_up else (E, D, I)
    if shape is not None and tuple(shape) != want:
        # still bound to its parameters, or each of them would be called missing too
        faults.add("misshapen", f"{quoted(stored)} is {list(shape)}, want {list(want)}")
    parts = (("w1", 0, I), ("w3", I, 2 * I)) if gate_up else (("w2", 0, D),)
    return [
        (Meaning(expert_name(prefix, expert, part), Role.WEIGHT), Slice(expert, start, stop))
        for expert in range(E)
        for part, start, stop in parts
    ]


def _skip_input_scales(
    sources: Mapping[str, Mapping[Role, Source]],
    mappings: Mapping[str, TensorMapping],
    faults: Faults,
    skipped: dict[str, str],
) -> None:
    """`input_scale` is ignored beside an NVFP4 matrix; anywhere else it belongs to a format that is not read."""
    for name, roles in sources.items():
        if source := roles.get(Role.NVFP4_INPUT_SCALE):
            if name in mappings and mappings[name].form is not Form.NVFP4:
                faults.add("scale not of this form", quoted(source.name))
            skipped[source.name] = INPUT_SCALE_REASON


def count(
    tensors: Mapping[str, Stored],
    demanded: Mapping[str, Parameter],
    mappings: Mapping[str, TensorMapping],
    skipped: Mapping[str, str],
    drafts: FoundHead,
    absent: Mapping[str, str],
) -> Census:
    """Add up what a checkpoint holds: every stored tensor is in `mappings`, `skipped`, or of an `absent` parameter."""
    kinds: dict[str, str] = dict.fromkeys(skipped, "ignored")
    by_form: dict[Form, Tally] = {}
    by_dtype: dict[str, Tally] = {}
    by_kind: dict[str, Tally] = {}
    for name, mapping in mappings.items():
        weights = math.prod(demanded[name].shape)
        kinds[mapping.weight] = demanded[name].kind
        nbytes = _nbytes(tensors[mapping.weight])
        if mapping.part is not None:  # its share of the stack
            nbytes = weights * ITEM_BYTES[tensors[mapping.weight][0]]
        for scale in (mapping.scale, mapping.global_scale):
            if scale is not None:
                kinds[scale] = "scale"
                nbytes += _nbytes(tensors[scale])
        by_form.setdefault(mapping.form, Tally()).add(weights, nbytes)
    for stored, (dtype, shape) in tensors.items():
        elements, nbytes = math.prod(shape), _nbytes((dtype, shape))
        by_dtype.setdefault(dtype, Tally()).add(elements, nbytes)
        by_kind.setdefault(kinds.get(stored, "of a parameter that is not whole"), Tally()).add(elements, nbytes)
    return Census(
        tensors=len(tensors),
        nbytes=sum(tally.nbytes for tally in by_dtype.values()),
        weights=sum(tally.elements for tally in by_form.values()),
        mappings=mappings,
        demanded=demanded,
        ignored=skipped,
        by_dtype=by_dtype,
        by_kind=by_kind,
        by_form=by_form,
        mtp_stages=drafts.stages,
        mtp_head=drafts.head,
        head=drafts.head if drafts.bound else None,
        absent=absent,
    )


def _nbytes(stored: Stored) -> int:
    return math.prod(stored[1]) * ITEM_BYTES[stored[0]]
