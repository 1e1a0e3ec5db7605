"""The two draft heads of DeepSeek-V4 as batched, differentiable networks over what the main model computed.

A stage is a block like that of an SWA layer with scored experts, numbered as if it stood behind the last one; embedding
and output head are the main model's and stay as they are. An anchor is a position p that the main model has run, and
whose next token is chosen: place j of its drafts, from 1, is the token at p + 1 + j. Tokens of a document between them
are taken as given (teacher forcing), which is what a head sees as long as its drafts are right.

Equations: preview MTP as vLLM runs it, DSpark as DeepSeek's `inference/model.py` does. Parameters carry the
checkpoint's names, except that the experts of a stage are stacked.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from fathom.kernels.rope.reference import angles
from fathom.model.config import Dspark, LayerKind, ModelConfig
from fathom.model.rope import layer_frequencies
from fathom.scripts.train.layers import HyperHead, Norm, Quantised
from fathom.scripts.train.v4_network import Angles, Attention, Block, Rounding


class Run(NamedTuple):
    """Documents as the main model ran them."""

    ids: Tensor  # [b, t], pads behind the end
    streams: Tensor  # [layers, b, t, streams, d] after every layer, in the main model's dtype
    logits: Tensor  # [b, t, vocab]


class Anchors(NamedTuple):
    """Where drafts start."""

    rows: Tensor  # [n]
    positions: Tensor  # [n]

    def of(self, x: Tensor, ahead: Tensor) -> Tensor:
        """What x [b, t, ...] holds `ahead` [k] positions behind each anchor, the last ones of it past its end."""
        at = (self.positions[:, None] + ahead).clamp(max=x.shape[1] - 1)
        return x[self.rows[:, None], at]


class Drafts(NamedTuple):
    """Outputs of a head, by anchor n and slot k."""

    logits: Tensor  # [n, k, vocab]
    confidence: Tensor | None  # [n, k] logit of the chance that the likeliest token is right; None: it has none


class Frozen(NamedTuple):
    """What the head takes from the main model."""

    embedding: Tensor  # [vocab, d]
    head: Tensor  # [vocab, d]


def windows(kv: Tensor, width: int) -> Tensor:
    """Map rows [b, t, d] -> the last `width` of them up to each position [b, t, width, d], zeros before the first."""
    return pad(kv, (0, 0, width - 1, 0)).unfold(1, width, 1).transpose(2, 3)


def attend(attn: Attention, q: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Attention with a sink over keys that are also the values.

    Parameters
    ----------
    attn
        Whose sink.
    q
        [n, s, h, d].
    keys
        [n, k, d], the same for all s queries.
    visible
        [n, k] bool.

    Returns
    -------
    Tensor
        [n, s, h, d].

    """
    n, s, h, d = q.shape
    scores = (q.flatten(1, 2) @ keys.mT).view(n, s, h, -1) * d**-0.5
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    sink = attn.attn_sink.view(1, 1, h, 1).expand(n, s, h, 1)
    p = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (p.flatten(1, 2) @ keys).view(n, s, h, d)


class Head(Rounding):
    """What both heads have: stages, the main model's embedding and head, and a rotation."""

    embedding: Tensor
    head: Tensor

    def __init__(self, config: ModelConfig, frozen: Frozen, stages: list[Block], places: int) -> None:
        super().__init__()
        self.config, self.places = config, places
        self.mtp = nn.ModuleList(stages)
        self.register_buffer("embedding", frozen.embedding, persistent=False)
        self.register_buffer("head", frozen.head, persistent=False)

    def blocks(self) -> list[Block]:
        """The stages, in order."""
        return [stage for stage in self.mtp if isinstance(stage, Block)]

    def turns(self, positions: Tensor) -> Angles:
        """Cos and sin at positions [tokens]."""
        return angles(positions, layer_frequencies(self.config, LayerKind.SWA))

    def in_window(self, positions: Tensor) -> Tensor:
        """[n, window] bool: which rows of the windows up to positions [n] are there."""
        width = self.config.sliding_window
        return positions[:, None] + torch.arange(1 - width, 1) >= 0


class MtpStage(Block):
    """The only stage of preview MTP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.num_hidden_layers)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj, self.h_proj = Quantised(hidden, hidden), Quantised(hidden, hidden)
        self.enorm, self.hnorm, self.norm = (Norm(hidden, eps) for _ in range(3))
        self.hc_head = HyperHead(config)


class Mtp(Head):
    """Preview MTP: each draft feeds the stage's own streams and the token drafted back to it, one position on.

    Keys of a draft: at positions up to the anchor the rows of the main model's streams, behind it those of the drafts
    before it and its own, as one ring of the window holds them.
    """

    def __init__(self, config: ModelConfig, frozen: Frozen, places: int) -> None:
        super().__init__(config, frozen, [MtpStage(config)], places)

    @property
    def stage(self) -> MtpStage:
        """The one it has."""
        (stage,) = self.blocks()
        assert isinstance(stage, MtpStage), "by its constructor"
        return stage

    def forward(self, run: Run, anchors: Anchors) -> Drafts:
        """Every position is an anchor here; those asked for are told of."""
        stage, (b, t) = self.stage, run.ids.shape
        X, ids = run.streams[-1].flatten(0, 1).float(), run.ids.roll(-1, 1)
        positions = torch.arange(t).repeat(b)
        turns, visible = self.turns(positions), self.in_window(positions)
        embedded = stage.e_proj(stage.enorm(self.embedding[ids.flatten()]))
        kept: list[Tensor] = []  # of each place before, rows [b, t, head_dim]
        logits = []
        for place in range(self.places):
            X = stage.around(
                embedded[:, None] + stage.h_proj(stage.hnorm(X)), ids, self._attention(turns, visible, kept, (b, t))
            )
            # place n of an anchor is computed n positions behind it
            at = anchors.of(stage.hc_head(X).view(b, t, -1), torch.tensor([place]))
            logits.append(linear(stage.norm(at), self.head))
            X = X.unflatten(0, (b, t)).roll(1, 1).flatten(0, 1)
        return Drafts(torch.cat(logits, 1), None)

    def _attention(
        self, turns: Angles, visible: Tensor, kept: list[Tensor], shape: tuple[int, int]
    ) -> Callable[[Tensor], Tensor]:
        """Attention of the next place, whose rows join those that are kept."""
        attn, width = self.stage.attn, self.config.sliding_window

        def attended(x: Tensor) -> Tensor:
            kept.append(attn.kv(x, turns).unflatten(0, shape))
            behind = len(kept) - 1  # positions of drafts in the window, its last ones
            drafted = [rows.roll(behind - place, 1) for place, rows in enumerate(kept) if place]
            near = windows(kept[0], width)[:, :, : width - behind]
            keys = torch.cat([near, torch.stack(drafted, 2)], 2) if drafted else near
            q = attn.query(attn.latent(x), turns).unsqueeze(1)
            return attn.output(attend(attn, q, keys.flatten(0, 1), visible).squeeze(1), turns)

        return attended


class FirstStage(Block):
    """Stage 0 of DSpark, which makes what all stages know of the main model."""

    def __init__(self, config: ModelConfig, targets: int) -> None:
        super().__init__(config, config.num_hidden_layers)
        self.main_proj = Quantised(targets * config.hidden_size, config.hidden_size)
        self.main_norm = Norm(config.hidden_size, config.rms_norm_eps)


class MarkovHead(nn.Module):
    """What the token before adds to the logits."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), nn.Linear(rank, vocab, bias=False)


class ConfidenceHead(nn.Module):
    """How likely a draft is right."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, bias=False)


class LastStage(Block):
    """The last stage of DSpark, which turns streams into drafts."""

    def __init__(self, config: ModelConfig, rank: int) -> None:
        super().__init__(config, config.num_hidden_layers)
        self.norm, self.hc_head = Norm(config.hidden_size, config.rms_norm_eps), HyperHead(config)
        self.markov_head = MarkovHead(config.vocab_size, rank)
        self.confidence_head = ConfidenceHead(config.hidden_size + rank)


class DSpark(Head):
    """DSpark: one pass drafts a block, whose slots see the main model's window and each other."""

    def __init__(self, config: ModelConfig, frozen: Frozen, settings: Dspark) -> None:
        first, last = FirstStage(config, len(settings.target_layer_ids)), LastStage(config, settings.markov_rank)
        between = [Block(config, config.num_hidden_layers) for _ in settings.target_layer_ids[2:]]
        super().__init__(config, frozen, [first, *between, last], settings.block_size)
        self.settings = settings

    @property
    def first(self) -> FirstStage:
        """Stage 0."""
        stage = self.blocks()[0]
        assert isinstance(stage, FirstStage), "by its constructor"
        return stage

    @property
    def last(self) -> LastStage:
        """The stage that drafts."""
        stage = self.blocks()[-1]
        assert isinstance(stage, LastStage), "by its constructor"
        return stage

    def main_x(self, run: Run) -> Tensor:
        """What all stages know of the main model's positions: [b * t, d]."""
        tapped = run.streams[list(self.settings.target_layer_ids)].mean(3).float()  # [targets, b, t, d]
        out: Tensor = self.first.main_norm(self.first.main_proj(tapped.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)))
        return out

    def forward(self, run: Run, anchors: Anchors) -> Drafts:
        """Blocks of all anchors."""
        (b, t), (n, slots) = run.ids.shape, (len(anchors.rows), self.places)
        main_x, main_turns = self.main_x(run), self.turns(torch.arange(t).repeat(b))
        ahead = 1 + torch.arange(slots)
        turns = self.turns((anchors.positions[:, None] + ahead).flatten())
        known = anchors.of(run.ids, ahead)  # [n, slots], the token before each place
        ids = torch.full((n, slots), self.settings.noise_token_id)
        ids[:, 0] = known[:, 0]
        visible = torch.cat([self.in_window(anchors.positions), torch.ones(n, slots, dtype=torch.bool)], 1)
        X = self.embedding[ids.flatten()].unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        for stage in self.blocks():
            rows = windows(stage.attn.kv(main_x, main_turns).view(b, t, -1), self.config.sliding_window)
            ring = rows[anchors.rows, anchors.positions]  # [n, window, head_dim]
            X = stage.around(X, ids, self._attention(stage.attn, turns, ring, visible))
        h = self.last.hc_head(X).view(n, slots, -1)
        before = self.last.markov_head.markov_w1(known)  # [n, slots, rank]
        logits = linear(self.last.norm(h), self.head) + self.last.markov_head.markov_w2(before)
        confidence = self.last.confidence_head.proj(torch.cat([h, before], -1)).squeeze(-1)
        return Drafts(logits, confidence)

    @staticmethod
    def _attention(attn: Attention, turns: Angles, ring: Tensor, visible: Tensor) -> Callable[[Tensor], Tensor]:
        """Attention of all slots to the ring [n, window, head_dim] and to all slots of their block."""

        def attended(x: Tensor) -> Tensor:
            keys = torch.cat([ring, attn.kv(x, turns).unflatten(0, (len(ring), -1))], 1)
            q = attn.query(attn.latent(x), turns).unflatten(0, (len(ring), -1))
            return attn.output(attend(attn, q, keys, visible).flatten(0, 1), turns)

        return attended
