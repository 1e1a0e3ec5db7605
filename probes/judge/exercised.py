"""What the rows of a recording could not have shown: an agreement says nothing of a clamp that no row reached."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from fathom.model.config import LayerKind, ModelConfig
from fathom.model.observe import sites
from fathom.probes.judge.checks import Checks, Judged, Status
from fathom.probes.judge.recording import stored_name

# Sites that follow from attention. Of those that were recorded the first is computed through it.
ATTENDED: Final = (
    sites.MIXED, sites.UNROTATED, sites.ATTENTION_OUTPUT, sites.ATTENTION_STREAMS, sites.STREAMS,
)  # fmt: skip


class Unseen(NamedTuple):
    """One thing, and what would show it."""

    what: str
    needs: str

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return self._asdict()


def unseen(checks: Checks, results: Sequence[Judged]) -> list[Unseen]:
    """What the rows that were judged could not have shown, of the layers that were."""
    seen = {(one.layer, one.site) for one in results if one.layer is not None and one.status is not Status.NOT_JUDGED}
    layers = sorted({layer for layer, _ in seen if layer is not None})
    attending = [layer for layer in layers if any((layer, site.name) in seen for site in ATTENDED)]
    return (
        [*_clamps(checks), *_lengths(checks, attending), *_choices(checks, layers), *_scales(checks)] if layers else []
    )


def _clamps(checks: Checks) -> Iterator[Unseen]:
    """SwiGLU's, of routed and of shared experts: gate from above, up on both sides."""
    limit = checks.config.swiglu_limit
    for whose in ("routed", "shared"):
        what = f"the clamp of {whose} experts at {limit:g}"
        reached = {part: checks.reached.get(f"{whose} {part}") for part in ("gate", "up")}
        known = {part: most for part, most in reached.items() if most is not None}
        short = {part: most for part, most in known.items() if most <= limit}
        if not known:
            yield Unseen(f"{what} (no output of them was judged)", "experts.output in the recording")
        elif short:
            most = ", ".join(f"{part} {value:.3g}" for part, value in short.items())
            times = limit / max(min(short.values()), 1e-300)
            needs = f"tokens that reach it: {times:.2g} times as much, or a model with a lower swiglu_limit"
            yield Unseen(f"{what} (largest {most})", needs)


def _lengths(checks: Checks, attending: Collection[int]) -> Iterator[Unseen]:
    """Windows, blocks and selections that none of the rows fills, of layers whose attention was judged."""
    config, tokens = checks.config, int(checks.sample.max()) + 1
    if not attending:
        yield Unseen("attention (nothing that follows from it was judged)", "attention.mixed in the recording")
        return
    if tokens <= config.sliding_window:
        yield Unseen(f"a full window ({tokens} of {config.sliding_window} tokens)", _tokens(config.sliding_window + 1))
    kinds = {kind: [n for n in attending if config.layer_kind(n) is kind] for kind in (LayerKind.CSA, LayerKind.HCA)}
    for kind, members in kinds.items():
        ratio = max((config.ratio(layer) for layer in members), default=0)
        if ratio and tokens < 2 * ratio:
            yield Unseen(f"a second {kind.name} block ({tokens // ratio} of {ratio} tokens)", _tokens(2 * ratio))
    ratio = max((config.ratio(layer) for layer in kinds[LayerKind.CSA]), default=0)
    if ratio and tokens // ratio <= config.index_topk:
        what = f"a selection that leaves something out ({tokens // ratio} entries, top {config.index_topk})"
        yield Unseen(what, _tokens((config.index_topk + 1) * ratio))


def _tokens(count: int) -> str:
    return f"{count} tokens or more"


def _choices(checks: Checks, layers: Collection[int]) -> Iterator[Unseen]:
    """Equal scores, and experts that nobody chose."""
    config, equal = checks.config, checks.ties.get(sites.SELECTED.name)
    if equal is None and any(map(config.selects, layers)):
        yield Unseen("which entries are selected (none were judged)", "indexer.selected in the recording")
    elif equal == 0:
        what = "which of two entries of equal score is taken (no two were)"
        yield Unseen(what, "a longer prompt: scores that are zero are equal")
    known = {layer: count for layer in layers if (count := _idle(checks, config, layer)) is not None}
    idle = {layer: count for layer, count in known.items() if count}
    if not known:
        yield Unseen("which experts are chosen (none were judged)", "experts.ids in the recording")
    elif idle:
        most = max(idle, key=lambda layer: idle[layer])
        what = f"experts that no token chose ({sum(idle.values())} in {len(idle)} layers, {idle[most]} of layer {most})"
        yield Unseen(what, "more tokens, and other ones")


def _idle(checks: Checks, config: ModelConfig, layer: int) -> int | None:
    """How many experts no judged row chose; None where that was not recorded."""
    name = stored_name(sites.EXPERT_IDS.name, layer)
    if name not in checks.recording.tensors:
        return None
    at = checks.recording.at(name)
    ids = checks.recording.known(name, at[torch.isin(at, checks.sample_of(layer))])
    return config.n_routed_experts - len(ids[(ids >= 0) & (ids < config.n_routed_experts)].unique())


def _scales(checks: Checks) -> Iterator[Unseen]:
    """Weights whose scales are all alike: who ignores them computes the same."""
    for form, (least, most) in checks.setting.parameters.scales.items():
        if least == most:
            yield Unseen(f"scales of {form} weights (all are {least:.3g})", "a checkpoint whose scales differ")
