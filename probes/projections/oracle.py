"""One layer's projections in float64 from the weights of the files, and the same with each of the likeliest mistakes.

Source: DeepSeek `Attention.forward`, `Compressor.forward` and `Indexer.forward`; paper section 2.3.
"""

from dataclasses import dataclass, replace

import numpy as np

from kernels.formats.stored import Dense, Fp4, Fp8, Weight
from model.checkpoint.weights import Weights
from model.config import ModelConfig
from probes.projections.known import Known, joined, pooled, product, rms_norm, rotated, times
from probes.rope.oracle import I64, Table
from probes.shared.moe import U
from probes.shared.narrow import F64, KV_GROUP, LINEAR_GROUP, decoded, f64
from runtime.options import RunOptions

NO_NORM = "queries not normed"
ALL_HEADS = "queries normed over all heads"
LATE = "position bias a token late"
HALVED = "gate halved"
MEAN = "no gate"
SWAPPED = "series swapped"
SIZES = "sizes of head weights"
NEXT_HEAD = "next head's weight"
NEXT_GROUP = "next group's rows"
Mistakes = dict[str, F64]  # what a run with the mistake would have, by its name


@dataclass(frozen=True)
class Series:
    """What a compressor projects from t tokens, before it pools."""

    kv: Known  # [t, series * width]
    gate: Known  # [t, series * width], without its position bias
    bias: F64  # [ratio, series * width]
    width: int

    def pooled(self) -> Known:
        """Entries [n, width] of the windows that t tokens close.

        Where a token brings two series, [next | own], an entry pools the first of the window before with the second of
        its own; the first window has none before it.
        """
        ratio, series = self.bias.shape[0], self.bias.shape[1] // self.width
        count = len(self.kv.value) // ratio
        kv = self.kv[: count * ratio].reshape(count, ratio, -1)
        gate = self.gate[: count * ratio].reshape(count, ratio, -1)
        value = gate.value + self.bias
        error = gate.error + 2 * U * (np.abs(gate.value) + np.abs(self.bias))
        if series == 1:
            return pooled(kv, Known(value, error))
        return pooled(
            Known(self._with_window_before(kv.value, 0.0), self._with_window_before(kv.error, 0.0)),
            Known(self._with_window_before(value, -np.inf), self._with_window_before(error, 0.0)),
        )

    def _with_window_before(self, x: F64, absent: float) -> F64:
        """[n, ratio, 2 * width] to [n, 2 * ratio, width]."""
        following, own = x[..., : self.width], x[..., self.width :]
        before = np.concatenate((np.full_like(following[:1], absent), following[:-1]))
        return np.concatenate((before, own), axis=1)

    def mistaken(self) -> dict[str, "Series"]:
        """The same with each mistake."""
        gate, width = self.gate, self.width
        found = {
            LATE: replace(self, bias=np.roll(self.bias, 1, axis=0)),
            HALVED: replace(self, gate=replace(gate, value=gate.value / 2)),
            MEAN: replace(self, gate=replace(gate, value=np.zeros_like(gate.value)), bias=np.zeros_like(self.bias)),
        }
        if self.bias.shape[1] > width:
            kv, gate = (
                replace(of, value=np.roll(of.value, width, axis=1), error=np.roll(of.error, width, axis=1))
                for of in (self.kv, self.gate)
            )
            found[SWAPPED] = replace(self, kv=kv, gate=gate, bias=np.roll(self.bias, width, axis=1))
        return found


@dataclass(frozen=True)
class Projections:
    """The projections of one checkpoint, rounding where a run with these options rounds."""

    config: ModelConfig
    weights: Weights
    options: RunOptions

    def latent(self, x: F64, layer: int) -> Known:
        """Inputs [t, hidden] to the normed low-rank query [t, q_lora_rank]."""
        return self._normed(self._linear(Known.exact(x), f"layers.{layer}.attn.wq_a"), f"layers.{layer}.attn.q_norm")

    def queries(self, latent: F64, layer: int, positions: I64) -> tuple[Known, Mistakes]:
        """Low-rank queries [t, q_lora_rank] to queries [t, heads, head_dim], each head normed, then rotated."""
        heads, eps = self.config.num_attention_heads, self.config.rms_norm_eps
        flat = self._linear(Known.exact(latent), f"layers.{layer}.attn.wq_b")
        q = flat.reshape(len(latent), heads, -1)
        together = rms_norm(flat, None, eps).reshape(*q.value.shape)
        mistakes = {NO_NORM: q} | ({ALL_HEADS: together} if heads > 1 else {})
        return (
            self._turned(self._kept(rms_norm(q, None, eps)), layer, positions),
            {name: self._turned(self._kept(wrong), layer, positions).value for name, wrong in mistakes.items()},
        )

    def kv(self, x: F64, layer: int, positions: I64) -> Known:
        """Inputs [t, hidden] to window KV [t, head_dim], as the ring stores it."""
        prefix = f"layers.{layer}.attn"
        normed = self._normed(self._linear(Known.exact(x), f"{prefix}.wkv"), f"{prefix}.kv_norm")
        return self._cached(self._turned(normed, layer, positions))

    def entries(self, x: F64, layer: int) -> tuple[Known, Mistakes]:
        """Inputs [t, hidden] of all tokens to the entries [n, head_dim] that they close, as stored."""
        prefix = f"layers.{layer}.attn.compressor"
        series = self._series(x, prefix)
        wrong = {name: self._cached(self._entry(one, prefix, layer)).value for name, one in series.mistaken().items()}
        return self._cached(self._entry(series, prefix, layer)), wrong

    def index_keys(self, x: F64, layer: int) -> tuple[Known, Mistakes]:
        """Inputs [t, hidden] of all tokens to the index keys [n, index_head_dim] that they close, not yet rounded."""
        prefix = f"layers.{layer}.attn.indexer.compressor"
        series = self._series(x, prefix)
        wrong = {name: self._entry(one, prefix, layer).value for name, one in series.mistaken().items()}
        return self._entry(series, prefix, layer), wrong

    def index_queries(self, latent: F64, layer: int, positions: I64) -> Known:
        """Low-rank queries [t, q_lora_rank] to index queries [t, heads, index_head_dim]: no norm, rotated."""
        flat = self._linear(Known.exact(latent), f"layers.{layer}.attn.indexer.wq_b")
        return self._turned(flat.reshape(len(latent), self.config.index_n_heads, -1), layer, positions)

    def index_weights(self, x: F64, layer: int) -> tuple[Known, Mistakes]:
        """Inputs [t, hidden] to the weight of each index head [t, heads], scaled."""
        scale = (self.config.index_head_dim * self.config.index_n_heads) ** -0.5
        weight = Dense(self.weights.vector(f"layers.{layer}.attn.indexer.weights_proj.weight"))
        made = self._kept(product(Known.exact(x), weight))
        found = Known(made.value * scale, made.error * scale + 2 * U * np.abs(made.value * scale), made.step)
        mistakes = {SIZES: np.abs(found.value)}
        if self.config.index_n_heads > 1:
            mistakes[NEXT_HEAD] = np.roll(found.value, 1, axis=1)
        return found, mistakes

    def output(self, out: F64, layer: int) -> tuple[Known, Mistakes]:
        """Attention output [t, heads, head_dim] to the sublayer's [t, hidden], by groups of heads and at low rank."""
        prefix, groups = f"layers.{layer}.attn", self.config.o_groups
        parts = Known.exact(out.reshape(len(out), groups, -1))
        # decoded whole: a group's rows need not begin with a block of its scales
        wo_a = decoded(self.weights.matrix(f"{prefix}.wo_a.weight")).reshape(groups, self.config.o_lora_rank, -1)
        ways = (wo_a, np.roll(wo_a, -1, axis=0)) if groups > 1 else (wo_a,)
        found = [
            self._linear(
                self._kept(joined((times(_group(parts, g), rows[g]) for g in range(groups)), 1)), f"{prefix}.wo_b"
            )
            for rows in ways
        ]
        return found[0], ({NEXT_GROUP: found[1].value} if groups > 1 else {})

    def logits(self, hidden: F64) -> Known:
        """Normed output [t, hidden] to logits [t, vocab], fp32 in every numerics."""
        return product(Known.exact(hidden), Dense(self.weights.vector("head.weight")))

    def embedded(self, tokens: I64) -> F64:
        """Rows [t, hidden] of the file's table."""
        table = self.weights.vector("embed.weight")
        return self._kept(Known.exact(f64(table[tokens.tolist()]))).value

    def _linear(self, x: Known, name: str) -> Known:
        """A quantisable linear: its input is rounded where deployed numerics rounds it, its output is kept."""
        weight: Weight = self.weights.matrix(f"{name}.weight")
        if self.options.numerics == "deployed" and isinstance(weight, Fp8 | Fp4):
            x = x.e4m3(LINEAR_GROUP)
        return self._kept(product(x, weight))

    def _kept(self, x: Known) -> Known:
        """Round to the dtype in which the run hands activations on."""
        return x.bf16() if self.options.dtype == "bf16" else x

    def _normed(self, x: Known, name: str) -> Known:
        return self._kept(rms_norm(x, f64(self.weights.vector(f"{name}.weight")), self.config.rms_norm_eps))

    def _turned(self, x: Known, layer: int, positions: I64) -> Known:
        table = Table.of_kind(self.config, self.config.layer_kind(layer))
        return self._kept(rotated(x, table, positions))

    def _cached(self, x: Known) -> Known:
        """Round as window KV and entries are stored: all but the rope dims."""
        deployed = self.options.numerics == "deployed"
        return x.e4m3(KV_GROUP, -self.config.qk_rope_head_dim) if deployed else x

    def _series(self, x: F64, prefix: str) -> Series:
        """Value and gate projections, in fp32 whatever the numerics."""
        kv, gate = (
            product(Known.exact(x), Dense(self.weights.vector(f"{prefix}.{of}.weight"))) for of in ("wkv", "wgate")
        )
        bias, norm = (f64(self.weights.vector(f"{prefix}.{of}")) for of in ("ape", "norm.weight"))
        return Series(kv, gate, bias, len(norm))

    def _entry(self, series: Series, prefix: str, layer: int) -> Known:
        """Pool, norm and rotate: each entry stands at the first position of its window."""
        rows = self._normed(self._kept(series.pooled()), f"{prefix}.norm")
        return self._turned(rows, layer, np.arange(len(rows.value)) * self.config.ratio(layer))


def _group(parts: Known, group: int) -> Known:
    """One group of heads of [t, groups, in]: [t, in]."""
    return replace(parts, value=parts.value[:, group], error=parts.error[:, group])
