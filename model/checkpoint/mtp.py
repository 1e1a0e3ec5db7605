"""The drafting heads in `mtp.*`: which names they may have. They are not run, but nothing else may hide there.

Two heads share the prefix, and each has its own layout:

- preview MTP: stage 0 alone, marked by `mtp.0.e_proj`. Flash-Base may add copies of embedding and head.
- DSpark: stages 0, 1 and 2, marked by `mtp.0.main_proj`.

Every stage holds a block like an SWA layer with scored experts, spelled in any dialect of `model.checkpoint.names`;
what a head adds to it has one spelling, since only DeepSeek's own files hold it (transformers drops `mtp.*`).

Stages are counted against these layouts and not against the config: `num_nextn_predict_layers` is 1 in every published
config, also beside three stages. A head may lack tensors, since none of them is used, but not a whole stage.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from model.checkpoint.names import Kind, Role, parameters, translate
from model.config import LayerKind, ModelConfig
from model.errors import shown

REASON: Final = "mtp: a drafting head; the main model is complete without it"

_MTP = re.compile(r"(?:model\.)?mtp\.(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)

_FINAL: Final = ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")


@dataclass(frozen=True, slots=True)
class _Layout:
    head: str
    marker: str  # a module of stage 0 that the other head does not have
    matrices: tuple[frozenset[str], ...]  # by stage: modules beside the block's, with scales in some files
    others: tuple[frozenset[str], ...]  # by stage: whole names beside the block's


_LAYOUTS: Final = (
    _Layout(
        "preview MTP",
        "e_proj",
        (frozenset({"e_proj", "h_proj"}),),
        (frozenset({"enorm.weight", "hnorm.weight", *_FINAL, "emb.tok_emb.weight", "head.weight"}),),
    ),
    _Layout(
        "DSpark",
        "main_proj",
        (frozenset({"main_proj"}), frozenset(), frozenset()),
        (
            frozenset({"main_norm.weight"}),
            frozenset(),
            frozenset(
                {
                    *_FINAL,
                    "markov_head.markov_w1.weight",
                    "markov_head.markov_w2.weight",
                    "confidence_head.proj.weight",
                }
            ),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Drafting:
    """The drafting head of a checkpoint, and what is wrong with it."""

    head: str | None = None  # "preview MTP" or "DSpark"; None without one, or when it cannot be told
    stages: int = 0
    unexpected: frozenset[str] = frozenset()  # stored names that the head does not have
    fault: str | None = None  # of the head as a whole


def stage_and_rest(stored: str) -> tuple[int, str] | None:
    """Stage and the name within it of an `mtp.N.` tensor, or None for any other."""
    match = _MTP.fullmatch(stored)
    return (int(match[1]), match[2]) if match else None


def drafting(names: Mapping[str, tuple[int, str]], config: ModelConfig) -> Drafting:
    """Hold the `mtp.*` names of a checkpoint against the two layouts.

    Parameters
    ----------
    names : Mapping[str, tuple[int, str]]
        Stored name -> what `stage_and_rest` says of it.
    config : ModelConfig
        Of the main model; a stage's block has as many experts as its layers.
    """
    if not names:
        return Drafting()
    first = {rest.split(".")[0] for stage, rest in names.values() if stage == 0}
    layouts = [layout for layout in _LAYOUTS if layout.marker in first]
    if len(layouts) != 1:
        markers = " nor ".join(f"{layout.marker} ({layout.head})" for layout in _LAYOUTS)
        both = " and ".join(layout.marker for layout in layouts)
        return Drafting(fault=f"mtp.0 holds both {both}" if both else f"mtp.0 holds neither {markers}")
    (layout,) = layouts
    block = _block(config)
    unexpected = {stored for stored, (stage, rest) in names.items() if not _belongs(layout, stage, rest, block)}
    found = {stage for stored, (stage, _) in names.items() if stored not in unexpected}
    want = list(range(len(layout.others)))
    whole = sorted(found) == want
    fault = None if whole else f"mtp stages {shown(sorted(found))}; {layout.head} has {want}"
    return Drafting(layout.head, len(found), frozenset(unexpected), fault)


def _belongs(layout: _Layout, stage: int, rest: str, block: Mapping[str, Kind]) -> bool:
    if stage >= len(layout.others):
        return False
    module, _, suffix = rest.rpartition(".")
    if rest in layout.others[stage] or (module in layout.matrices[stage] and suffix in ("weight", "scale")):
        return True
    meaning = translate(f"layers.0.{rest}")
    if meaning is None or meaning.parameter not in block:
        return False
    return meaning.role is Role.WEIGHT or block[meaning.parameter] == "matrix"


def _block(config: ModelConfig) -> dict[str, Kind]:
    """The parameters of a stage's block, called as those of layer 0: SWA, experts chosen by score."""
    one = replace(config, num_hidden_layers=1, compress_ratios=(0,), layer_kinds=(LayerKind.SWA,), num_hash_layers=0)
    return {name: parameter.kind for name, parameter in parameters(one).items() if name.startswith("layers.0.")}
