"""What each rounding of deployed numerics costs by itself, in float64 on what a run hands to it."""

from dataclasses import dataclass

import numpy as np

from kernels.formats.stored import Fp4, Fp8
from model.config import LayerKind
from model.observe import sites
from model.observe.sites import Site
from probes.finding import Finding, Table, at_most, exactly, judged
from probes.quantisation.cases import off_grid
from probes.shared.moe import Experts, distances
from probes.shared.narrow import (
    E2M1,
    E4M3,
    F64,
    INDEX_GROUP,
    KV_GROUP,
    LINEAR_GROUP,
    decoded,
    f64,
    hadamard,
    rounded_blocks,
)
from probes.shared.recorder import Recorder

# Relative error of one number: at most half a step, 1/16 of itself (E4M3 has three bits of mantissa), and numbers far
# below their block's largest add next to nothing. So no rounding to E4M3 costs more than this.
E4M3_COST = 2.0**-4
# fp32 and float64 now and then fall on two sides of a rounding to bf16, and then of one to E2M1.
UNLIKE = 0.01
# every value of a token off by one last place of bf16
CLOSE = 2.0**-8
WATCHED = (
    sites.ATTENTION_INPUT,
    sites.LATENT,
    sites.KV,
    sites.ENTRY,
    sites.INDEX_KEY,
    sites.INDEX_KEY_USED,
    sites.INDEX_QUERY,
    sites.INDEX_QUERY_USED,
    sites.UNROTATED,
    sites.EXPERTS_INPUT,
    sites.SHARED_GATE,
    sites.SHARED_UP,
)
INPUTS = {
    "input of wq_a, wkv": (sites.ATTENTION_INPUT, "attn.wq_a"),
    "input of wq_b": (sites.LATENT, "attn.wq_b"),
    "input of experts": (sites.EXPERTS_INPUT, "ffn.shared_experts.w1"),
}
COLUMNS = (
    "input of wq_a, wkv",
    "input of wq_b",
    "input of wo_b",
    "input of experts",
    "input of w2, shared",
    "KV",
    "index query",
    "index key",
)


@dataclass(frozen=True)
class Costs:
    """One layer: what its roundings cost, and whether the run rounds as float64 does."""

    layer: int
    cost: dict[str, float]  # by COLUMNS: RMS of the error as a share of the RMS of what is rounded; missing where not
    kv: float  # distance of the stored KV from float64 with the rounding, median token
    blocks: int  # of KV and entries as stored, rope dims left out
    off_grid: int  # of those, blocks that are no E4M3 numbers times a power of two
    index: dict[str, float]  # share of index queries and keys that are not those of float64 with the rounding


def costs(recorder: Recorder, layer: int, oracle: Experts) -> Costs:
    """Measure one layer of a deployed run."""

    def rows(site: Site) -> F64:
        return f64(recorder.rows(site, layer))

    config, prefix = oracle.config, f"layers.{layer}"
    given = {name: rows(site) for name, (site, matrix) in INPUTS.items() if _rounds(oracle, f"{prefix}.{matrix}")}
    if _rounds(oracle, f"{prefix}.attn.wo_b"):
        given["input of wo_b"] = _low_rank(rows(sites.UNROTATED), f"{prefix}.attn.wo_a", oracle)
    if _rounds(oracle, f"{prefix}.ffn.shared_experts.w2"):
        gate, up = rows(sites.SHARED_GATE), rows(sites.SHARED_UP)
        given["input of w2, shared"] = oracle.activation(gate, up, None, config.swiglu_limit)
    cost = {name: _cost(x, rounded_blocks(x, LINEAR_GROUP, E4M3)) for name, x in given.items()}
    nope = config.head_dim - config.qk_rope_head_dim
    before = _kv(rows(sites.ATTENTION_INPUT), f"{prefix}.attn", oracle)[:, :nope]
    after = rounded_blocks(before, KV_GROUP, E4M3)
    cost["KV"] = _cost(before, after)
    index = {}
    if config.layer_kind(layer) is LayerKind.CSA:
        pairs = {"query": (sites.INDEX_QUERY, sites.INDEX_QUERY_USED), "key": (sites.INDEX_KEY, sites.INDEX_KEY_USED)}
        for name, (made, used) in pairs.items():
            turned = oracle.kept(hadamard(rows(made)))
            wanted = rounded_blocks(turned, INDEX_GROUP, E2M1)
            cost[f"index {name}"] = _cost(turned, wanted)
            index[name] = float((rows(used) != wanted).mean())
    stored = rows(sites.KV)[:, :nope]
    kv = float(np.median(distances(stored, after)))
    if config.layer_kind(layer) is not LayerKind.SWA:
        stored = np.concatenate((stored, rows(sites.ENTRY)[:, :nope]))
    off = off_grid(stored, KV_GROUP, E4M3)
    return Costs(layer, cost, kv, off.size, int(off.sum()), index)


def _rounds(oracle: Experts, name: str) -> bool:
    """Whether deployed numerics rounds the input of a matrix: where the matrix itself is FP8 or FP4."""
    return isinstance(oracle.weights.matrix(f"{name}.weight"), Fp8 | Fp4)


def _cost(x: F64, rounded: F64) -> float:
    size = np.linalg.norm(x)
    return float(np.linalg.norm(rounded - x) / size) if size else 0.0


def _low_rank(out: F64, name: str, oracle: Experts) -> F64:
    """The input of wo_b: attention output [t, heads, head_dim], each group of heads by its own rows of wo_a."""
    groups = oracle.config.o_groups
    wo_a = decoded(oracle.weights.matrix(f"{name}.weight")).reshape(groups, oracle.config.o_lora_rank, -1)
    low = np.einsum("tgd,grd->tgr", out.reshape(len(out), groups, -1), wo_a)
    return oracle.kept(low.reshape(len(out), -1))


def _kv(x: F64, prefix: str, oracle: Experts) -> F64:
    """KV [t, head_dim] before its rounding, and but for the rope dims, which are not rotated here."""
    y = oracle.linear(x, f"{prefix}.wkv")
    size = np.sqrt((y**2).mean(1, keepdims=True) + oracle.config.rms_norm_eps)
    return oracle.kept(y / size * f64(oracle.weights.vector(f"{prefix}.kv_norm.weight")))


def findings(layers: list[Costs]) -> list[Finding]:
    """Judge that the run rounds as deployed, and that no rounding costs more than its format explains."""
    worst = max(layers, key=lambda one: one.kv)
    off = [one.layer for one in layers if one.off_grid]
    found = [
        judged(
            "KV as stored, median token's distance from float64, worst layer",
            worst.kv,
            at_most(CLOSE),
            layer=worst.layer,
        )
    ]
    what = "KV and entries as stored, blocks that are no E4M3 numbers times a power of two"
    blocks = sum(one.blocks for one in layers)
    found.append(judged(what, sum(one.off_grid for one in layers), exactly(0), of=blocks, layers=off))
    for name in ("query", "key"):
        having = [one for one in layers if name in one.index]
        if having:
            most = max(having, key=lambda one: one.index[name])
            what = f"index {'queries' if name == 'query' else 'keys'} as scored, values unlike float64, worst layer"
            found.append(judged(what, most.index[name], at_most(UNLIKE), layer=most.layer))
    narrow = {(name, one.layer): cost for one in layers for name, cost in one.cost.items() if "index" not in name}
    (name, layer), cost = max(narrow.items(), key=lambda item: item[1])
    what = "error of one rounding to E4M3, as a share of what is rounded, largest"
    return [*found, judged(what, cost, at_most(E4M3_COST), layer=layer, where=name)]


def table(layers: list[Costs]) -> Table:
    """A row for each layer."""
    rows = [(one.layer, *(_percent(one.cost.get(name)) for name in COLUMNS)) for one in layers]
    note = (
        "RMS of the error of this rounding alone, in % of the RMS of what is rounded. The two of the index are E2M1 "
        "per 32 columns after the Hadamard transform, the rest E4M3. Empty: not rounded in this layer."
    )
    return Table("What each rounding costs by itself", ("layer", *COLUMNS), rows, note)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
