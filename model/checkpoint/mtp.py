"""The draft heads in `mtp.*`: what they hold, by name and shape.

Two heads share the prefix, and each has its own layout:

- preview MTP: stage 0 alone, marked by `mtp.0.e_proj`. Flash-Base may add copies of embedding and head.
- DSpark: stages 0, 1 and 2, marked by `mtp.0.main_proj`.

Every stage holds a block like an SWA layer with scored experts, spelled in any dialect of `model.checkpoint.names`;
what a head adds to it has one spelling, since only DeepSeek's own files hold it (transformers drops `mtp.*`).

Stages are counted against these layouts and not against the config: `num_nextn_predict_layers` is 1 in every published
config, also beside three stages. A head that is not run may lack tensors, but not a whole stage; one that is run is
bound as strictly as the model.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fathom.model.checkpoint.names import Meaning, Parameter, Role, hyper_head, of_layer, translate
from fathom.model.choices import DSPARK, MTP
from fathom.model.config import MAX_DRAFTS, Dspark, ModelConfig
from fathom.model.errors import shown

NOT_RUN: Final = "mtp: a draft head, which --draft alone runs; the main model is complete without it"
COPIES: Final = "mtp: copies of embedding and output head; the draft head uses the main model's"

_MTP = re.compile(r"(?:model\.)?mtp\.(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)
_COPIED: Final = ("emb.tok_emb.weight", "head.weight")  # beside stage 0 of MTP


class Head(StrEnum):
    """A kind of draft head."""

    MTP = "preview MTP"
    DSPARK = "DSpark"

    @property
    def option(self) -> str:
        """What `--draft` calls it."""
        return {Head.MTP: MTP, Head.DSPARK: DSPARK}[self]

    @property
    def stages(self) -> int:
        """How many blocks it has."""
        return {Head.MTP: 1, Head.DSPARK: 3}[self]

    @property
    def marker(self) -> str:
        """A module of stage 0 that the other head does not have."""
        return {Head.MTP: "e_proj", Head.DSPARK: "main_proj"}[self]


HEADS_BY_NAME: Final = {head.option: head for head in Head}


@dataclass(frozen=True, slots=True)
class FoundHead:
    """The draft head of a checkpoint, and what is wrong with it."""

    head: Head | None = None  # None without one, or when it cannot be told
    stages: int = 0
    unexpected: frozenset[str] = frozenset()  # stored names that the head does not have
    fault: str | None = None  # of the head as a whole
    bound: bool = False  # whether it is a part of the model


def announced(config: ModelConfig) -> Head | None:
    """The draft head that config.json says there is."""
    if config.dspark is not None:
        return Head.DSPARK
    return Head.MTP if config.num_mtp_layers == Head.MTP.stages else None


def contradiction(drafts: Dspark, config: ModelConfig) -> str | None:
    """What config.json says of DSpark's stages that the model cannot have."""
    layers, targets = config.num_hidden_layers, list(drafts.target_layer_ids)
    if drafts.block_size > MAX_DRAFTS:
        return f"dspark_block_size is {drafts.block_size}, more than {MAX_DRAFTS}"
    if drafts.noise_token_id >= config.vocab_size:
        return f"dspark_noise_token_id is {drafts.noise_token_id}, outside the vocabulary"
    if not targets or len(set(targets)) < len(targets) or max(targets) >= layers:
        return f"dspark_target_layer_ids is {targets}, want different layers below {layers}"
    # V4.1's reads what enters a layer: here what the one before it left, and where n-grams are added there is no such.
    unheard = () if config.v41 is None else (0, *config.v41.engram.layer_ids)
    if not {*targets}.isdisjoint(unheard):
        return f"dspark_target_layer_ids is {targets}: streams that enter layers {list(unheard)} are not heard here"
    return None


def stage_and_rest(stored: str) -> tuple[int, str] | None:
    """Stage and the name within it of an `mtp.N.` tensor, or None for any other."""
    match = _MTP.fullmatch(stored)
    return (int(match[1]), match[2]) if match else None


def head_parameters(head: Head, config: ModelConfig) -> dict[str, Parameter]:
    """Every parameter that a draft head has, by official name.

    Shapes of DSpark's are those of `ModelConfig.dspark`; without it there are names alone.
    """
    demanded: dict[str, Parameter] = {}
    for stage in range(head.stages):
        demanded |= of_layer(config, config.num_hidden_layers + stage)
        demanded |= {f"mtp.{stage}.{name}": parameter for name, parameter in _added(head, stage, config)}
    return demanded


def _added(head: Head, stage: int, config: ModelConfig) -> Iterator[tuple[str, Parameter]]:
    """What a stage has beside its block."""
    V, D, drafts = config.vocab_size, config.hidden_size, config.dspark
    rank, targets = (0, 0) if drafts is None else (drafts.markov_rank, len(drafts.target_layer_ids))
    if head is Head.MTP:
        yield "e_proj.weight", Parameter((D, D), "matrix")
        yield "h_proj.weight", Parameter((D, D), "matrix")
        yield "enorm.weight", Parameter((D,), "bf16")
        yield "hnorm.weight", Parameter((D,), "bf16")
    elif stage == 0:
        yield "main_proj.weight", Parameter((D, targets * D), "matrix")
        yield "main_norm.weight", Parameter((D,), "bf16")
    if stage < head.stages - 1:
        return
    yield "norm.weight", Parameter((D,), "bf16")
    if config.v41 is None:
        yield from hyper_head(config).items()
    if head is Head.DSPARK:
        markov = ("markov_w1", "markov_w2") if config.v41 is None else ("embed", "head")
        for name in markov:
            yield f"markov_head.{name}.weight", Parameter((V, rank), "bf16")
        yield "confidence_head.proj.weight", Parameter((1, D + rank), "bf16")


def copied(stored: str) -> bool:
    """Whether a stored tensor is a copy of the main model's embedding or head."""
    place = stage_and_rest(stored)
    return place is not None and place[0] == 0 and place[1] in _COPIED


def meaning(stored: str) -> Meaning | None:
    """What the stored name of an `mtp.*` tensor means, as `model.checkpoint.names.translate` says of others."""
    place = stage_and_rest(stored)
    if place is None:
        return None
    stage, rest = place
    of_block = translate(f"layers.0.{rest}")
    if of_block is not None:
        return Meaning(f"mtp.{stage}.{of_block.parameter.removeprefix('layers.0.')}", of_block.role)
    module, _, suffix = rest.rpartition(".")
    if suffix == "scale":
        return Meaning(f"mtp.{stage}.{module}.weight", Role.SCALE)
    return Meaning(f"mtp.{stage}.{rest}", Role.WEIGHT)


def found_head(names: Mapping[str, tuple[int, str]], config: ModelConfig) -> FoundHead:
    """Hold the `mtp.*` names of a checkpoint against the two layouts.

    Parameters
    ----------
    names : Mapping[str, tuple[int, str]]
        Stored name -> what `stage_and_rest` says of it.
    config : ModelConfig
        Of the main model; a stage's block has as many experts as its layers, but in V4.1.
    """
    if not names:
        return FoundHead()
    first = {rest.split(".")[0] for stage, rest in names.values() if stage == 0}
    heads = [head for head in Head if head.marker in first]
    if len(heads) != 1:
        markers = " nor ".join(f"{head.marker} ({head})" for head in Head)
        both = " and ".join(head.marker for head in heads)
        return FoundHead(fault=f"mtp.0 holds both {both}" if both else f"mtp.0 holds neither {markers}")
    (head,) = heads
    demanded = head_parameters(head, config)
    unexpected = {stored for stored in names if not _belongs(stored, head, demanded)}
    found = {stage for stored, (stage, _) in names.items() if stored not in unexpected}
    want = list(range(head.stages))
    whole = sorted(found) == want
    fault = None if whole else f"mtp stages {shown(sorted(found))}; {head} has {want}"
    return FoundHead(head, len(found), frozenset(unexpected), fault)


def _belongs(stored: str, head: Head, demanded: Mapping[str, Parameter]) -> bool:
    if head is Head.MTP and copied(stored):
        return True
    found = meaning(stored)
    if found is None or found.parameter not in demanded:
        return False
    return found.role is Role.WEIGHT or demanded[found.parameter].kind == "matrix"
