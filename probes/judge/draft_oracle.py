"""The oracle of the draft heads, preview MTP and DSpark, V4.1's too, in float64: what a run's drafts are judged by.

A stage is a layer of `probes.judge.oracle` behind the main model's: SWA, plain RoPE, experts chosen by score. What a
head adds is written here from the published equations; of `model` it takes the facts of config.json.

All tensors are [r, n, ...] float64 as in `probes.judge.oracle`, the exact values first; what the main model gives a
head has no r. A head takes the id of the exact logits, or the ids that a run drafted, so that each draft is judged by
itself.

Where published runtimes have gone wrong is a field of `Reading`, and each of `FAULTS` is another value of one field.

Source: DeepSeek's inference code, model.py; for drafting with MTP, vLLM's deepseek_v4/nvidia/mtp.py.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor

from fathom.model.config import ModelConfig, Yarn
from fathom.model.rounding import Rounding
from fathom.probes.judge.oracle import F64, MOST, Layer, Noise, Parameters, Part, Setting
from fathom.probes.judge.oracle_v41 import Layer41


@dataclass(frozen=True, slots=True)
class Reading:
    """The points of both heads that have been read in two ways."""

    # Base and YaRN of a stage's RoPE.
    rotation: Callable[[ModelConfig], tuple[float, Yarn | None]]
    # MTP: streams [r, n, s, hidden] of the main model's tokens as heard, from them and the positions [n].
    heard: Callable[[Tensor, Tensor], Tensor]
    # MTP: embeddings [r, n, hidden] of the following ids, from them and the positions [n].
    embedded: Callable[[Tensor, Tensor], Tensor]
    # MTP: the streams of the next draft, from the stage's [r, 1, s, hidden] and their hyper head [r, 1, hidden].
    fed_back: Callable[[Tensor, Tensor], Tensor]
    # DSpark: rows [r, n, d] of the main model's tokens as remembered, from them and the positions [n].
    main_rows: Callable[[Tensor, Tensor], Tensor]
    # DSpark: position of the first slot, from the last position that the main model has run.
    first_slot: Callable[[int], int]
    # DSpark: positions [B] by which the block's keys are rotated, from those of its slots.
    key_positions: Callable[[Tensor], Tensor]
    # DSpark: the block's keys, from what they are before and after they are rounded.
    block_keys: Callable[[Tensor, Tensor], Tensor]
    # DSpark: bool [B, k], keys that a slot does not see, from positions [B, 1] and [k] and the window.
    hidden: Callable[[Tensor, Tensor, int], Tensor]
    # DSpark: what the confidence is made of, from the hyper head [r, B, hidden] before and after its norm.
    confident: Callable[[Tensor, Tensor], Tensor]
    # V4.1: the weights [r, B, s] that a stage reads its streams by, from those that the stage before left.
    carried: Callable[[Tensor], Tensor]


RIGHT: Final = Reading(
    rotation=lambda config: (config.rope_theta, None),
    heard=lambda streams, _: streams,
    embedded=lambda rows, _: rows,
    fed_back=lambda streams, _: streams,
    main_rows=lambda rows, _: rows,
    first_slot=lambda last: last + 1,
    key_positions=lambda slots: slots,
    block_keys=lambda _, rounded: rounded,
    hidden=lambda slots, keys, _: torch.zeros(len(slots), len(keys), dtype=torch.bool),
    confident=lambda h, _: h,
    carried=lambda pre: pre,
)


def skipping(positions: Collection[int]) -> Reading:
    """The fault that what the main model gives of these positions was never heard."""
    absent = torch.tensor(sorted(positions))
    return replace(
        RIGHT,
        heard=lambda streams, at: streams.masked_fill(torch.isin(at, absent)[:, None, None], 0),
        main_rows=lambda rows, at: rows.masked_fill(torch.isin(at, absent)[:, None], 0),
    )


def of_one_stream(pre: Tensor) -> Tensor:
    """Weights [..., s] that read the first stream alone."""
    return torch.zeros_like(pre).index_fill(-1, torch.tensor([0]), 1)


FAULTS: Final[Mapping[str, Reading]] = {
    "rope-of-compressed-layers": replace(
        RIGHT, rotation=lambda config: (config.compress_rope_theta, config.rope_scaling)
    ),
    "yarn-beside-their-own-base": replace(RIGHT, rotation=lambda config: (config.rope_theta, config.rope_scaling)),
    "first-embedding-zero": replace(RIGHT, embedded=lambda rows, at: rows.masked_fill((at == 0)[:, None], 0)),
    "collapsed-fed-back": replace(RIGHT, fed_back=lambda streams, h: h[:, :, None].expand_as(streams)),
    "block-one-early": replace(RIGHT, first_slot=lambda last: last),
    "block-keys-unmoved": replace(RIGHT, key_positions=lambda slots: slots[:1].expand_as(slots) - 1),
    "block-keys-unrounded": replace(RIGHT, block_keys=lambda exact, _: exact),
    "block-causal": replace(RIGHT, hidden=lambda slots, keys, _: keys > slots),
    "window-slides": replace(RIGHT, hidden=lambda slots, keys, window: keys <= slots - window),
    "confidence-normed": replace(RIGHT, confident=lambda _, normed: normed),
    "pre-not-carried": replace(RIGHT, carried=of_one_stream),
}


def acts(reading: Reading, head: "type[Head]") -> bool:
    """Whether a reading differs from the right one in a point that a head has."""
    return any(getattr(reading, point) is not getattr(RIGHT, point) for point in head.points)


class _NothingRecorded:
    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        del name, at
        return None


class Head(Part):
    """What both heads have in common: their stages, and the way from the last stage's streams to logits.

    Parameters
    ----------
    config
        Of the main model.
    parameters
        The main model's and those of `mtp.*`.
    stages
        How many.
    rounding
        What of activations is rounded.
    noise
        Of the replicas.
    reading
        `RIGHT`, or one of the faults.

    """

    points: ClassVar[tuple[str, ...]]  # fields of `Reading` that it has

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        stages: int,
        rounding: Rounding,
        noise: Noise,
        reading: Reading = RIGHT,
    ) -> None:
        self.stages, self.reading = stages, reading
        tokens = torch.empty(0, dtype=torch.int64)
        freely = noise.through_layers()  # nothing within a block is taken as it was recorded
        setting = Setting(config, parameters, tokens, rounding, _NothingRecorded(), freely)
        super().__init__(setting, f"mtp.{stages - 1}.")
        self.main = Part(self.setting, "")

    def outcome(self, streams: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the last stage's streams [r, n, s, hidden] at positions [n]: hyper head, the same normed, and logits."""
        with self.noise.of(self.prefix, "outcome", rows=at):
            return self.normed_and_logits(self.hyper_head(streams))

    def normed_and_logits(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the last stage's streams were read to [r, n, hidden], the same normed, and logits."""
        normed = self.rms_norm(h, self.parameters[self.name("norm.weight")])
        return h, normed, self.product(normed, self.parameters["head.weight"])


class Stage(Layer):
    """One stage: its parameters, and how it rotates and remembers.

    Parameters
    ----------
    head
        That it belongs to.
    stage
        Its number.
    at
        [n] int64, ascending: positions that are looked at.

    """

    def __init__(self, head: Head, stage: int, at: Tensor) -> None:
        super().__init__(head.setting, head.config.num_hidden_layers + stage, at)
        self.prefix, self.reading = f"mtp.{stage}.", head.reading
        self.rope_theta, self.yarn = self.reading.rotation(self.config)


class Block(Stage):
    """The block of a stage over residual streams [r, n, s, hidden] of the positions from `first` on."""

    def __init__(self, head: Head, stage: int, at: Tensor, streams: Tensor, first: int) -> None:
        super().__init__(head, stage, at)
        self.streams, self.first = streams, first

    def before(self, at: Tensor) -> Tensor:
        """The streams that were given."""
        return self.streams[:, at - self.first]


class Slots(Layer):
    """How DSpark's slots attend: all see the same keys, `rows` [r, n, d] of the main model and their own."""

    rows: Tensor
    row_positions: Tensor
    reading: Reading

    def see(self, rows: Tensor) -> None:
        """Take the rows of the main model; of more than a window has, the last."""
        self.rows = rows[:, -self.config.sliding_window :]
        self.row_positions = torch.arange(rows.shape[1])[-self.config.sliding_window :]

    def turned_keys(self, kv: Tensor, at: Tensor) -> Tensor:
        """Keys of the block, [r, B, d]."""
        return super().turned_keys(kv, self.reading.key_positions(at))

    def cached(self, kv: Tensor) -> Tensor:
        """Rounded, though the block's keys are not remembered."""
        return self.reading.block_keys(kv, super().cached(kv))

    def _attended(
        self, at: Tensor, sinks: Tensor | None = None, *, entries: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        del entries
        q = self.value("attention.query", at)
        keys = self.joined(self.rows, self.value("attention.kv", at), dim=1)
        hidden = self.reading.hidden(at[:, None], torch.cat((self.row_positions, at)), self.config.sliding_window)
        seen = keys[:, None].expand(-1, len(at), -1, -1)
        sinks = (self.sinks if sinks is None else sinks).clamp(-MOST, MOST)
        yield self.softmax_over(q, seen, hidden, sinks, keys.shape[1])


class SlotBlock(Slots, Block):
    """The block of a DSpark stage."""

    def __init__(self, head: Head, stage: int, at: Tensor, streams: Tensor, rows: Tensor) -> None:
        super().__init__(head, stage, at, streams, int(at[0]))
        self.see(rows)


class Block41(Layer41):
    """A stage of V4.1's head: a block over streams, which reads them by the weights that the stage before left."""

    def __init__(self, head: Head, stage: int, at: Tensor) -> None:
        super().__init__(head.setting, head.config.num_hidden_layers + stage, at)
        self.prefix, self.reading = f"mtp.{stage}.", head.reading
        self.rope_theta, self.yarn = self.reading.rotation(self.config)


class SlotBlock41(Slots, Block41):
    """The same, over slots: their streams [r, B, s, hidden] and `pre` [r, B, s]."""

    def __init__(self, head: Head, stage: int, at: Tensor, streams: Tensor, pre: Tensor, rows: Tensor) -> None:
        super().__init__(head, stage, at)
        self.streams, self.pre_before = streams, pre
        self.see(rows)

    def before(self, at: Tensor) -> Tensor:
        """The streams that were given."""
        return self.streams[:, at - self.at[0]]

    def read_by(self, part: str, at: Tensor) -> Tensor:
        """The attention reads by what was given."""
        return self.pre_before[:, at - self.at[0]] if part == "attention" else super().read_by(part, at)


@dataclass(frozen=True, slots=True)
class MtpDraft:
    """What preview MTP makes of n rows, and k drafts."""

    streams: Tensor  # [r, n + k - 1, s, hidden], behind the stage, by position
    keys: Tensor  # [r, n + k - 1, d], as remembered, by position
    logits: Tensor  # [r, k, vocab]
    ids: Tensor  # [k] int64


class Mtp(Head):
    """Preview MTP: one stage, whose streams it takes again for each further draft."""

    points = ("rotation", "heard", "embedded", "fed_back")

    def entered(self, streams: Tensor, following: Tensor, at: Tensor) -> Tensor:
        """The stage's input [r, n, s, hidden].

        Parameters
        ----------
        streams
            [r, n, s, hidden] behind the last layer of the main model, or behind the stage.
        following
            [n] int64: the id that follows each.
        at
            [n] int64: positions.

        """
        with self.noise.of(self.prefix, "entered", rows=at):
            embedded = self.reading.embedded(self.main.looked_up("embed.weight", following), at)
            token = self.linear(self.rms_norm(embedded, self.parameters[self.name("enorm.weight")]), "e_proj.weight")
            own = self.linear(self.rms_norm(streams, self.parameters[self.name("hnorm.weight")]), "h_proj.weight")
            return self.noise.moved(token[:, :, None] + own)

    def draft(self, streams: Tensor, following: Tensor, count: int, chosen: Tensor | None = None) -> MtpDraft:
        """Run the stage over all rows, then draft from the last.

        Parameters
        ----------
        streams
            [n, s, hidden]: the main model's behind its last layer, of positions 0 to n - 1.
        following
            [n] int64: the id that follows each; the last is the token that was chosen and is not run.
        count
            Drafts, at least 1.
        chosen
            [count - 1] int64 or more: drafts to go on with; None: the greedy ones.

        """
        n = len(streams)
        at = torch.arange(n)
        entered = self.entered(self.reading.heard(streams[None], at), following, at)
        behind = [Block(self, 0, at, entered, 0).value("streams", at)]
        h, _, logits = self.outcome(behind[0][:, -1:], at[-1:])
        found, ids = [logits], [logits[0, 0].argmax()]
        for step in range(count - 1):
            at = torch.tensor([n + step])
            following = (ids[step] if chosen is None else chosen[step])[None]
            again = self.reading.fed_back(behind[-1][:, -1:], h)
            entered = torch.cat((entered, self.entered(again, following, at)), 1)
            behind.append(Block(self, 0, at, entered, 0).value("streams", at))
            h, _, logits = self.outcome(behind[-1], at)
            found.append(logits)
            ids.append(logits[0, 0].argmax())
        at = torch.arange(n + count - 1)
        keys = Block(self, 0, at, entered, 0).value("attention.kv", at)
        return MtpDraft(torch.cat(behind, 1), keys, torch.cat(found, 1), torch.stack(ids))


@dataclass(frozen=True, slots=True)
class DsparkDraft:
    """What one pass of DSpark makes of its B slots."""

    h: Tensor  # [r, B, hidden], the hyper head before its norm
    base: Tensor  # [r, B, vocab], logits before the Markov term
    logits: Tensor  # [r, B, vocab]
    ids: Tensor  # [B] int64
    confidence: Tensor  # [r, B], of which the sigmoid is a chance


class Dspark(Head):
    """DSpark: stages that draft a block at once, from what the main model's last layers left.

    `main_keys` is what is remembered of the tokens that the main model has run, `draft` a pass behind them.
    """

    points: ClassVar[tuple[str, ...]] = (
        "rotation",
        "main_rows",
        "first_slot",
        "key_positions",
        "block_keys",
        "hidden",
        "confident",
    )
    markov = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"

    def stage(self, number: int, at: Tensor) -> "Stage | Block41":
        """A stage that remembers."""
        return Stage(self, number, at)

    def behind(self, streams: Tensor, main_keys: tuple[Tensor, ...], at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`outcome` of the slots at positions [B], through all stages."""
        for stage, rows in enumerate(main_keys):
            streams = SlotBlock(self, stage, at, streams, rows).value("streams", at)
        return self.outcome(streams, at)

    def main_keys(self, taps: Tensor) -> tuple[Tensor, ...]:
        """Keys [r, n, d] of each stage.

        Parameters
        ----------
        taps
            [n, targets, s, hidden]: streams behind each target layer, of positions 0 to n - 1. V4.1's are those that
            enter the layer, n-grams added.

        """
        first, at = Part(self.setting, "mtp.0."), torch.arange(len(taps))
        with self.noise.of(first.prefix, "main", rows=at):
            main_hidden = self.noise.moved(taps[None].mean(3)).flatten(2)  # [r, n, targets * hidden]
            projected = first.linear(main_hidden, "main_proj.weight")
            main_x = self.rms_norm(projected, self.parameters[first.name("main_norm.weight")])
        keys = []
        for stage in (self.stage(stage, at) for stage in range(self.stages)):
            with self.noise.of(stage.prefix, "main keys", rows=at):
                keys.append(self.reading.main_rows(stage.keys(main_x, at), at))
        return tuple(keys)

    def draft(self, main_keys: tuple[Tensor, ...], slots: Tensor, chosen: Tensor | None = None) -> DsparkDraft:
        """One pass.

        Parameters
        ----------
        main_keys
            Keys [r, n, d] of each stage, of positions 0 to n - 1.
        slots
            [B] int64: the token that was chosen for position n and is not run, and noise tokens.
        chosen
            [B - 1] int64 or more: drafts to go on with; None: the greedy ones.

        """
        first = self.reading.first_slot(main_keys[0].shape[1] - 1)
        at = first + torch.arange(len(slots))
        streams = self.main.looked_up("embed.weight", slots)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        h, normed, base = self.behind(streams, main_keys, at)
        previous, found, before, ids = slots[0], [], [], []
        for slot in range(len(slots)):
            with self.noise.of(self.prefix, "markov", rows=at[slot : slot + 1]):
                before.append(self.looked_up(self.markov[0], previous[None]))
                term = self.linear(before[-1], self.markov[1])
                found.append(self.noise.moved(base[:, slot : slot + 1] + term))
            ids.append(found[-1][0, 0].argmax())
            previous = ids[slot] if chosen is None or slot == len(chosen) else chosen[slot]
        features = (self.reading.confident(h, normed), torch.cat(before, 1))
        joined = self.joined(*features, dim=-1)
        with self.noise.of(self.prefix, "confidence", rows=at):
            confidence = self.linear(joined, "confidence_head.proj.weight")[..., 0]
        return DsparkDraft(h, base, torch.cat(found, 1), torch.stack(ids), confidence)


class Dspark41(Dspark):
    """V4.1's: `pre` is carried from stage to stage, and the last one's reads the streams; there is no hyper head."""

    points = (*Dspark.points, "carried")
    markov = "markov_head.embed.weight", "markov_head.head.weight"

    def stage(self, number: int, at: Tensor) -> Block41:
        """A stage that remembers."""
        return Block41(self, number, at)

    def behind(self, streams: Tensor, main_keys: tuple[Tensor, ...], at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`outcome` of the slots at positions [B], through all stages."""
        pre = of_one_stream(torch.empty(1, len(at), self.config.hc_mult, dtype=F64))
        for number, rows in enumerate(main_keys):
            stage = SlotBlock41(self, number, at, streams, self.reading.carried(pre) if number else pre, rows)
            streams, pre = stage.value("streams", at), stage.value("experts.pre", at)
        with self.noise.of(self.prefix, "outcome", rows=at):
            return self.normed_and_logits(self.collapsed(streams, pre))
