"""What a layer of DeepSeek-V4.1 computes otherwise than one of V4, in float64: see `probes.judge.oracle`.

A layer passes on its streams and one more thing: the weights by which the next sublayer reads them, since `pre` is
delayed by one. Few layers have a compressor or an indexer; the others read the entries, and the selection, of the
nearest layer before them that has one: as they were recorded, else as that layer computes them.

Source: DeepSeek's inference code for V4.1-Flash, model.py, engram.py and kernel.py at dba1be0a.
"""

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.rounding import ALL_FP8, FP4, FP8, RECORD, TWICE
from fathom.probes.judge.engram import table_rows
from fathom.probes.judge.oracle import (
    CANDIDATES,
    E2M1,
    E2M1_INDEX,
    E4M3,
    E4M3_KV,
    E4M3_ROW,
    F32,
    F64,
    FREELY,
    SELECTED,
    TOKENS,
    Layer,
    Narrow,
    Setting,
    Unknown,
    length,
)

if TYPE_CHECKING:
    from fathom.model.config import V41, ModelConfig

ENTRY_BLOCK: Final = 16  # columns of an entry that share a scale
PINNED: Final = 1e30  # the score of a block that is always open
KV, ENTRY = "attention.kv", "attention.entry"
OF_ENTRIES: Final = (ENTRY, "indexer.key_used")  # that layers read of the one which makes them
CODES: Final = E2M1[:8]
SCALES: Final = E4M3[(E4M3 > 0) & E4M3.isfinite()].sort().values


class EntryForm(Narrow):
    """E2M1 with a scale in E4M3 for each block: DeepSeek's `fp4_act_quant` of compressed entries."""

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [..., blocks, columns] of x, and the scale of each, [..., blocks, 1]; divided in fp32, as there."""
        blocks = x.unflatten(-1, (-1, self.block or x.shape[-1]))
        amax = blocks.abs().amax(-1, keepdim=True).clamp_min(self.least)
        scale = (amax.to(F32) / self.largest).to(F64)
        step = E4M3_ROW.step(scale)
        return blocks, (torch.round(scale / step) * step).clamp_max(E4M3_ROW.largest)

    def borders(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The middles between this scale and its neighbours in E4M3, times the largest code."""
        place = torch.searchsorted(SCALES, scale.contiguous())
        below, above = SCALES[(place - 1).clamp_min(0)], SCALES[(place + 1).clamp_max(len(SCALES) - 1)]
        return self.largest * (below + scale) / 2, self.largest * (scale + above) / 2

    def held(self, x: Tensor) -> Tensor:
        """As `rounded`, but blocks that are codes times another scale stay: tiny ones round again to other numbers."""
        out = self.rounded(x)
        blocks, kept = x.unflatten(-1, (-1, self.block)), out.unflatten(-1, (-1, self.block))
        where = (blocks != kept).any(-1) & blocks.isfinite().all(-1)
        for place in where.nonzero().tolist():
            block = blocks[tuple(place)]
            codes = block.abs()[None] / SCALES[:, None]
            if bool(torch.isin(codes, CODES).all(-1).any()):
                kept[tuple(place)] = block
        held: Tensor = kept.flatten(-2)
        return held


E2M1_ENTRY: Final = EntryForm("E2M1", 6.0, 6 * 2.0**-9, E2M1_INDEX.step, ENTRY_BLOCK)


class Kept(NamedTuple):
    """A format of a cache, and how many of a row's numbers are in it, from the first on."""

    narrow: Narrow
    columns: int


def kept_form(config: "ModelConfig", kv: str, site: str) -> Kept | None:
    """What window KV or entries of V4.1 are kept in under a choice of `Rounding.kv`; None: as they are computed."""
    by_block = Kept(E4M3_ROW._replace(block=config.fp8_block), config.head_dim)
    record = Kept(E4M3_KV, config.head_dim - config.qk_rope_head_dim)
    entry = Kept(E2M1_ENTRY, config.head_dim)
    forms = {FP8: entry if site == ENTRY else by_block, ALL_FP8: by_block, RECORD: record, TWICE: record}
    return forms.get(kv)


def held_form(config: "ModelConfig", kv: str, site: str, rows: Tensor) -> Tensor | None:
    """Rows [n, d] rounded to what they are kept in; None where they are kept as they are computed."""
    form = kept_form(config, kv, site)
    if form is None:
        return None
    some = rows[..., : form.columns]
    held = E2M1_ENTRY.held(some) if isinstance(form.narrow, EntryForm) else form.narrow.rounded(some)
    return torch.cat((held, rows[..., form.columns :]), -1)


class Layer41(Layer):
    """One layer of V4.1."""

    def __init__(self, setting: Setting, layer: int, at: Tensor) -> None:
        super().__init__(setting, layer, at)
        assert self.config.v41 is not None, "of its config"
        self.own: V41 = self.config.v41
        self.others: dict[int, Layer41] = {}  # layers that this one reads, by number

    def look(self, at: Tensor) -> None:
        """Go on to other positions."""
        super().look(at)
        for other in self.others.values():
            other.look(at)

    def value(self, site: str, at: Tensor) -> Tensor:
        """What the layer goes on with at a site, its own or that of the layer which has it."""
        source = self.config.selection_source(self.layer) if site == SELECTED else self.layer
        if site in OF_ENTRIES:
            source = self.config.entry_source(self.layer)
        return super().value(site, at) if source == self.layer else self.of_layer(source, site, at)

    def of_layer(self, source: int, site: str, at: Tensor) -> Tensor:
        """A site of another layer."""
        theirs = self.setting.theirs
        if source < self.layer and theirs.rows(f"layers.{self.layer - 1}.streams", self.at) is None:
            return self.of_run(source, site, at)
        other = self.others.setdefault(source, type(self)(self.setting, source, self.at))
        at = other.entries if at is self.entries else other.at if at is self.at else at
        other.rests = set()
        out = other.value(site, at)
        self.rests |= other.rests
        return out

    def of_run(self, source: int, site: str, at: Tensor) -> Tensor:
        """The same, of the one run from the embeddings on that this layer's input comes from: no layer runs twice."""
        other: Layer = self
        while other.layer != source:
            other = other.run_before()
        self.rests.add(FREELY)
        if at is self.entries:
            return other.value(site, other.entries)
        return other.value(site, at) if site in OF_ENTRIES else other.value(site, other.at)[:, at]

    # --- Engram, and the streams that enter

    def before(self, at: Tensor) -> Tensor:
        """The streams that enter the layer, n-grams added, [r, n, s, hidden]."""
        return self.value("engram.streams", at) if self.has_engram else self.arriving(at)

    @property
    def has_engram(self) -> bool:
        """Whether n-grams are added before the layer."""
        return self.layer in self.own.engram.layer_ids

    def arriving(self, at: Tensor) -> Tensor:
        """The streams that the layer before left, [r, n, s, hidden]."""
        return super().before(at)

    def read_by(self, part: str, at: Tensor) -> Tensor:
        """The weights [r, n, s] that a sublayer reads the streams by: of the one before; at first one stream alone."""
        if part == "experts":
            return self.value("attention.pre", at)
        if not self.layer:
            first = torch.zeros(self.config.hc_mult, dtype=F64)
            first[0] = 1
            return first.expand(1, len(at), -1)
        names = [f"layers.{self.layer - 1}.{site}" for site in ("streams", "experts.pre", "attention.streams")]
        streams, *sources = (self.setting.theirs.rows(name, at) for name in names)
        if streams is not None and all(source is None for source in sources):
            raise Unknown(f"{names[1]} are not recorded, by which the streams are read")
        return self.of_layer(self.layer - 1, "experts.pre", at)

    def _engram_rows(self, at: Tensor) -> Tensor:
        """Rows of the tables side by side, [1, n, columns * width]."""
        return self.rows_of(at)

    def rows_of(self, at: Tensor, start: Tensor | None = None) -> Tensor:
        """Rows of n-grams that reach back to position `start` [t], as `_engram_rows`."""
        if self.setting.alike is None:
            raise Unknown(f"{self.prefix}engram.rows are not recorded, and there is no tokenizer.json to look them up")
        return self.found_rows(table_rows(self.config, self.layer, self.setting.tokens, self.setting.alike, at, start))

    def found_rows(self, rows: Tensor) -> Tensor:
        """Rows [n, columns] of the layer's table side by side."""
        found = self.parameters.rows(self.name("engram.embed.weight"), rows.flatten())
        return self.noise.stored(found.unflatten(0, rows.shape).flatten(1)[None])

    def key_and_value(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rows: a key for each stream [r, n, s, hidden], and one value [r, n, hidden]."""
        s = self.config.hc_mult
        out = self.linear(self.value("engram.rows", at), "engram.wkv.weight").unflatten(-1, (s + 1, -1))
        return out[:, :, :s], out[:, :, s]

    def _engram_gate(self, at: Tensor) -> Tensor:
        """``sigmoid(sign(g) sqrt |g|)`` of ``g = <x w, key> / (|x| |key|) hidden^-0.5``, each stream by itself."""
        streams, (keys, _) = self.arriving(at), self.key_and_value(at)
        weight = self.parameters[self.name("engram.q_weight")] * self.parameters[self.name("engram.k_weight")]
        streams, keys = self._alike(streams, keys)
        factor = self.stream_factor(streams) * torch.rsqrt(keys.square().mean(-1) + self.config.rms_norm_eps)
        factor = factor * self.config.hidden_size**-0.5
        size = length(streams * weight) * length(keys) * factor
        g = self.noise.moved(self.noise.summed((streams * weight * keys).sum(-1) * factor, size), F32)
        return self.noise.moved(self.gate_of(g), F32)

    def stream_factor(self, streams: Tensor) -> Tensor:
        """What norms each stream, [r, n, s]."""
        return torch.rsqrt(streams.square().mean(-1) + self.config.rms_norm_eps)

    def gate_of(self, g: Tensor) -> Tensor:
        """How much of the value a stream takes, by its product with the key."""
        return torch.sigmoid(g.sign() * g.abs().clamp_min(1e-6).sqrt())

    def _engram_streams(self, at: Tensor) -> Tensor:
        streams, gate, (_, value) = self.arriving(at), self.value("engram.gate", at), self.key_and_value(at)
        streams, gate, value = self._alike(streams, gate, value)
        return self.noise.moved(streams + gate[..., None] * value[:, :, None])

    # --- attention

    def _query_unrotated(self, at: Tensor) -> Tensor:
        return self.passed("attention.query_unnormed", at)  # no norm of heads

    def cached(self, kv: Tensor) -> Tensor:
        """A key of the window as it is remembered: by DeepSeek all of its dims in E4M3, by 32."""
        return self.in_form(kv, KV)

    def in_form(self, rows: Tensor, site: str) -> Tensor:
        """Keys or entries [r, n, d] in the format that the run keeps them in."""
        if site == ENTRY and self.rounding.kv == TWICE:
            rows = self.narrow(rows, E2M1_ENTRY)
        form = kept_form(self.config, self.rounding.kv, site)
        if form is None:
            return rows
        return self.joined(self.narrow(rows[..., : form.columns], form.narrow), rows[..., form.columns :], dim=-1)

    def pooled(self, parameter: str, width: int, at: Tensor) -> Tensor:
        """Entries `at`, [r, n, width]: pairs of tokens pooled by their gates, no pair over another; or each token."""
        del width
        return self.pooled_from(parameter, at)

    def pooled_from(self, parameter: str, at: Tensor, late: int = 0) -> Tensor:
        """As `pooled`, of tokens so many places before."""
        wkv = self.parameters[self.name(f"{parameter}.wkv.weight")]
        found = []
        for part in self.noise.parts(at, max(1, TOKENS // self.ratio)):
            tokens = (at[part][:, None] * self.ratio + torch.arange(self.ratio) - late).flatten().clamp_min(0)
            x = self.value("attention.input", tokens)
            with self.noise.of(self.prefix, parameter, "tokens", rows=tokens):
                kv = self.product(x, wkv)
                if self.ratio == 1:
                    found.append(kv)
                    continue
                gate = self.product(x, self.parameters[self.name(f"{parameter}.wgate.weight")])
            kv, gate = (rows.unflatten(1, (-1, self.ratio)) for rows in (kv, gate))
            share = self.noise.moved(gate.softmax(2))
            found.append(self.noise.moved((kv * share).sum(2)))
        return torch.cat(found, 1)

    def _entry(self, at: Tensor) -> Tensor:
        entry = self.rotated(self.passed("attention.entry_unrotated", at), self.entry_positions(at))
        return self.in_form(entry, ENTRY)

    def entry_positions(self, at: Tensor) -> Tensor:
        """Where entries [n] stand: at their first token."""
        return at * self.ratio

    def kept(self, site: str, rows: Tensor) -> Tensor | None:
        """Rows [n, d] in the format that a site is kept in, of a run that keeps it in another; None of this one."""
        del site, rows
        return None

    # --- indexer: keys of the normed entries before their rotation, and no Hadamard

    def _index_key_unnormed(self, at: Tensor) -> Tensor:
        return self.linear(self.passed("attention.entry_unrotated", at), "attn.indexer.wk.weight")

    def _index_key_unrotated(self, at: Tensor) -> Tensor:
        return self.rms_norm(
            self.passed("indexer.key_unnormed", at), self.parameters[self.name("attn.indexer.k_norm.weight")]
        )

    def index_rounded(self, x: Tensor) -> Tensor:
        """An index query or key as it is scored."""
        forms = {FP4: E2M1_INDEX, FP8: E4M3_ROW}
        return self.narrow(x, forms[self.rounding.index]) if self.rounding.index in forms else x

    def finished_scores(self, at: Tensor) -> Tensor:
        """Scores [r, n, entries] by the keys that the layer reads, of candidates and others, -inf where unfinished."""
        return self.scored(at, self.value("indexer.key_used", self.entries))

    def of_heads(self, each: Tensor, weights: Tensor) -> Tensor:
        """Each head's scores are weighted in a step of their own."""
        each, weights = self._alike(each, weights)
        return self.noise.moved(each * weights[..., None]).sum(2)

    def index_scores(self, at: Tensor) -> Tensor:
        """Scores of the entries that may be selected: behind the candidates' layer, those of open blocks alone."""
        scores = self.finished_scores(at)
        if self.layer <= self.own.candidate_source or len(self.entries) <= self.capacity:
            return scores
        blocks = self.of_layer(self.own.candidate_source, CANDIDATES, at).long()
        count = -(-len(self.entries) // self.own.candidate_block_size)
        is_open = torch.zeros(*blocks.shape[:2], count + 1, dtype=torch.bool)
        is_open.scatter_(2, blocks.masked_fill(blocks < 0, count), value=True)
        of_entries = is_open[..., :count].repeat_interleave(self.own.candidate_block_size, -1)[..., : len(self.entries)]
        scores, of_entries = self._alike(scores, of_entries)
        return scores.masked_fill(~of_entries, -math.inf)

    @property
    def capacity(self) -> int:
        """Entries that the candidates can hold: where there are no more, all that are finished are open."""
        return self.own.candidate_blocks * self.own.candidate_block_size

    def block_scores(self, at: Tensor) -> Tensor:
        """What blocks of entries are opened by, [r, n, blocks]: the best of theirs, the newest block always."""
        best, size, finished = self.best_of_blocks(at), self.own.candidate_block_size, (at + 1) // self.ratio
        newest = ((finished - 1).clamp_min(0) // size)[:, None] == torch.arange(best.shape[-1])
        opened: Tensor = best.masked_fill(newest & (finished > 0)[:, None], PINNED)
        return opened

    def best_of_blocks(self, at: Tensor) -> Tensor:
        """The best score of each block of entries, [r, n, blocks]."""
        scores, size = self.finished_scores(at), self.own.candidate_block_size
        scores = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % size), value=-math.inf)
        best: Tensor = scores.unflatten(-1, (-1, size)).amax(-1)
        return best

    def _candidates(self, at: Tensor) -> Tensor:
        scores = self.block_scores(at)
        k = min(self.own.candidate_blocks, scores.shape[-1])
        best = self.noise.choosing(scores, k, self.apart).sort(dim=-1, descending=True, stable=True)
        return best.indices[..., :k].masked_fill(best.values[..., :k].isneginf(), -1).to(F64)
