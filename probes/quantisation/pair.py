"""One prompt in deployed and plain numerics side by side: how far apart they are at every site and at the logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.config import ModelConfig
from model.observe import sites
from model.observe.observer import listening
from model.observe.sites import Listener, Site
from model.state import State
from model.transformer import Transformer
from probes.shared.recorder import Recorder

COMPARED = (
    sites.ATTENTION_INPUT,
    sites.QUERY,
    sites.KV,
    sites.ENTRY,
    sites.INDEX_QUERY,
    sites.INDEX_KEY,
    sites.MIXED,
    sites.ATTENTION_OUTPUT,
    sites.EXPERTS_INPUT,
    sites.EXPERTS_OUTPUT,
    sites.STREAMS,
)
CHOICES = (sites.SELECTED, sites.EXPERT_IDS)
Seen = dict[tuple[str, int], Tensor]  # by site and layer: what passed in one call
LOGIT_ROWS = 128  # tokens whose logits are held at a time
DECIDED = 0.1  # a position is decided where the first two tokens are so far apart in probability


@dataclass
class Pair:
    """Sums over the tokens so far."""

    config: ModelConfig
    difference: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # squares: of it, of plain
    common: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # choices in common, and of plain
    kl: list[float] = field(default_factory=list)  # nats, by position
    agree: list[bool] = field(default_factory=list)  # whether the likeliest token is the same
    margin: list[float] = field(default_factory=list)  # probability between plain's first two tokens
    loss: list[float] = field(default_factory=lambda: [0.0, 0.0])  # nats over all next tokens: deployed, plain

    def share(self, site: Site, layer: int) -> float | None:
        """RMS of the difference as a share of the RMS of plain; None where the layer has no such site."""
        if (site.name, layer) not in self.difference:
            return None
        apart, size = self.difference[site.name, layer]
        return float((apart / size) ** 0.5) if size else None

    def overlap(self, site: Site, layer: int) -> float | None:
        """Share of plain's choices that deployed made too; None where there was nothing to choose."""
        both, of = self.common.get((site.name, layer), (0, 0))
        return both / of if of else None

    def decided(self) -> list[bool]:
        """Of the positions where plain is decided, whether deployed's likeliest token is the same."""
        return [agree for agree, margin in zip(self.agree, self.margin, strict=True) if margin >= DECIDED]

    def add_sites(self, deployed: Seen, plain: Seen, first: int) -> None:
        """Add one call, of positions ``first ..``."""
        for (name, layer), a in deployed.items():
            b = plain[name, layer]
            if name == sites.SELECTED.name:
                # the first tokens see no more entries than are selected: there is a choice after them
                free = (self.config.index_topk + 1) * self.config.compress_ratios[layer] - 1
                self._add_choices((name, layer), a[max(0, free - first) :], b[max(0, free - first) :])
            elif name == sites.EXPERT_IDS.name:
                if not self.config.is_hash(layer):
                    self._add_choices((name, layer), a, b)
            else:
                apart, size = self.difference.get((name, layer), (0.0, 0.0))
                more = (a.double() - b.double()).square().sum().item(), b.double().square().sum().item()
                self.difference[name, layer] = apart + more[0], size + more[1]

    def _add_choices(self, key: tuple[str, int], a: Tensor, b: Tensor) -> None:
        """Add choices [t, k] of entries or experts."""
        if not b.numel():
            return
        both, of = self.common.get(key, (0, 0))
        width = int(max(a.max(), b.max())) + 1
        x, y = (torch.zeros(len(ids), width, dtype=torch.bool).scatter_(1, ids.long(), 1) for ids in (a, b))
        self.common[key] = both + int((x & y).sum()), of + int(y.sum())

    def add_logits(self, deployed: Tensor, plain: Tensor, following: Tensor) -> None:
        """Add logits [t, vocab] and the tokens that came next: at least t of them but at the end, where one lacks."""
        a, b = deployed.double().log_softmax(-1), plain.double().log_softmax(-1)
        self.kl += (b.exp() * (b - a)).sum(-1).tolist()
        self.agree += (a.argmax(-1) == b.argmax(-1)).tolist()
        first, second = b.exp().topk(2).values.unbind(-1)
        self.margin += (first - second).tolist()
        known = following[: len(a), None]
        for side, x in enumerate((a, b)):
            self.loss[side] -= x[: len(known)].gather(1, known).sum().item()


def _run(model: Transformer, tokens: Tensor, state: State, heard: Mapping[Site, Listener]) -> tuple[Tensor, Seen]:
    """One call: hidden rows, and what passed."""
    parts: dict[tuple[str, int], list[Tensor]] = {}

    def keep(site: Site) -> Listener:
        def listener(layer: int | None, tensor: Tensor) -> None:
            assert layer is not None, f"{site.name} has a layer"
            parts.setdefault((site.name, layer), []).append(tensor.cpu().clone())

        return listener

    with listening(model, {site: keep(site) for site in (*COMPARED, *CHOICES)}), listening(model, heard):
        hidden = model(tokens, state)
    return hidden, {key: torch.cat(some) for key, some in parts.items()}


def run_pair(
    deployed: Transformer,
    plain: Transformer,
    tokens: list[int],
    chunk: int,
    tick: Callable[[float], None],
    recorder: Recorder | None = None,
) -> Pair:
    """Run `tokens` through both in calls of `chunk`; `recorder` listens to the deployed one besides."""
    listeners = {} if recorder is None else recorder.listeners()
    pair = Pair(plain.config)
    ids = torch.tensor(tokens, dtype=torch.int64, device=plain.device)
    states = [model.new_state(len(tokens), chunk) for model in (deployed, plain)]
    for first in range(0, len(tokens), chunk):
        part = ids[first : first + chunk]
        ours, seen = _run(deployed, part, states[0], listeners)
        theirs, seen_plain = _run(plain, part, states[1], {})
        pair.add_sites(seen, seen_plain, first)
        for low in range(0, len(part), LOGIT_ROWS):
            some = slice(low, low + LOGIT_ROWS)
            pair.add_logits(deployed.logits(ours[some]), plain.logits(theirs[some]), ids[first + 1 :][some])
        tick((first + len(part)) / len(tokens))
    return pair
