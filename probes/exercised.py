"""What the rows of a recording could not have shown: an agreement says nothing of a clamp that no row reached."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fathom.model.config import LayerKind, ModelConfig
from fathom.model.observe import sites
from fathom.probes.checks import Checks, Judged, Status
from fathom.probes.recording import stored_name


class Unseen(NamedTuple):
    """One thing, and what would show it."""

    what: str
    needs: str

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return self._asdict()


def unseen(checks: Checks, results: Sequence[Judged]) -> list[Unseen]:
    """What the rows that were judged could not have shown, of the layers that were."""
    layers = sorted({one.layer for one in results if one.layer is not None and one.status is not Status.NOT_JUDGED})
    if not layers:
        return []
    return [*_clamps(checks), *_lengths(checks, layers), *_choices(checks, layers), *_scales(checks)]


def _clamps(checks: Checks) -> Iterator[Unseen]:
    """SwiGLU's, of routed and of shared experts: gate from above, up on both sides."""
    limit = checks.config.swiglu_limit
    for whose in ("routed", "shared"):
        reached = {part: checks.reached.get(f"{whose} {part}") for part in ("gate", "up")}
        short = {part: most for part, most in reached.items() if most is not None and most <= limit}
        if short:
            most = ", ".join(f"{part} {value:.3g}" for part, value in short.items())
            times = limit / max(min(short.values()), 1e-300)
            yield Unseen(
                f"the clamp of {whose} experts at {limit:g} (largest {most})",
                f"tokens that reach it: {times:.2g} times as much, or a model with a lower swiglu_limit",
            )


def _lengths(checks: Checks, layers: Collection[int]) -> Iterator[Unseen]:
    """Windows, blocks and selections that none of the rows fills."""
    config, tokens = checks.config, int(checks.sample.max()) + 1
    if tokens <= config.sliding_window:
        yield Unseen(f"a full window ({tokens} of {config.sliding_window} tokens)", _tokens(config.sliding_window + 1))
    kinds = {kind: [n for n in layers if config.layer_kind(n) is kind] for kind in (LayerKind.CSA, LayerKind.HCA)}
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
    config = checks.config
    if checks.ties.get(sites.SELECTED.name) == 0:
        what = "which of two entries of equal score is taken (no two were)"
        yield Unseen(what, "a longer prompt: scores that are zero are equal")
    idle = {layer: count for layer in layers if (count := _idle(checks, config, layer))}
    if idle:
        most = max(idle, key=lambda layer: idle[layer])
        what = f"experts that no token chose ({sum(idle.values())} in {len(idle)} layers, {idle[most]} of layer {most})"
        yield Unseen(what, "more tokens, and other ones")


def _idle(checks: Checks, config: ModelConfig, layer: int) -> int:
    name = stored_name(sites.EXPERT_IDS.name, layer)
    if name not in checks.recording.tensors:
        return 0
    at = checks.recording.at(name)
    ids = checks.recording.rows(name, at[torch.isin(at, checks.sample)])
    assert ids is not None, f"rows of {name} that it has"
    return config.n_routed_experts - len(ids[(ids >= 0) & (ids < config.n_routed_experts)].unique())


def _scales(checks: Checks) -> Iterator[Unseen]:
    """Weights whose scales are all alike: who ignores them computes the same."""
    for form, (least, most) in checks.setting.parameters.scales.items():
        if least == most:
            yield Unseen(f"scales of {form} weights (all are {least:.3g})", "a checkpoint whose scales differ")
