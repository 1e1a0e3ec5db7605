"""What can be said of rotations without running the model: tables, golden angles, and the op on known vectors."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from kernels.ops import Ops
from model.attention import CsaAttention, HcaAttention
from model.config import LayerKind, ModelConfig
from model.rope import Rotation, layer_frequencies
from model.transformer import Transformer
from probes.finding import JSON, Finding, at_most, exactly, judged
from probes.rope.oracle import EDGE, GOLDEN, GOLDEN_DIM, GOLDEN_PAIRS, POSITIONS, Table, U, apart, pairs
from probes.shared.narrow import f64


def rotations_of(model: Transformer, layer: int) -> list[Rotation]:
    """Every rotation that a layer holds."""
    attention = model.blocks[layer].attention
    held = [attention.rotation]
    if isinstance(attention, HcaAttention):
        held.append(attention.compressor.rotation)
    if isinstance(attention, CsaAttention):
        held.append(attention.indexer.compressor.rotation)
    return held


def tables_of(model: Transformer, tables: dict[LayerKind, Table]) -> Iterator[Finding]:
    """Cosines and sines of each kind against the formula; of every layer, entries' positions included."""
    positions = np.array(POSITIONS)
    longest = 0.0
    for kind, table in tables.items():
        worst: tuple[float, int, dict[str, JSON]] = (-1.0, 0, {})
        for layer in (layer for layer, of in enumerate(model.config.layer_kinds) if of is kind):
            step = model.config.ratio(layer) or 1
            for rotation in rotations_of(model, layer):
                for at, (first, every) in enumerate([*((p, 1) for p in POSITIONS), (step, step)]):
                    where = positions[at : at + 1] if at < len(positions) else step * np.arange(1, 9)
                    cos, sin = (f64(part) for part in rotation.at(first, len(where), every))
                    longest = float(np.maximum(longest, np.abs(np.hypot(cos, sin) - 1).max()))
                    share = apart(cos, sin, table.angles(where)) / table.allowed(where)
                    row, pair = np.unravel_index(int(np.argmax(share)), share.shape)
                    if not share[row, pair] <= worst[0] and not math.isnan(worst[0]):
                        evidence = {"position": int(where[row]), "pair": int(pair), "cos": float(cos[row, pair])}
                        worst = float(share[row, pair]), layer, evidence
        yield judged(
            f"table of {kind.name} layers: angle off {words(table)}, over what fp32 allows, worst",
            worst[0],
            at_most(1),  # half ulps of the angle, counted operation by operation in `Table.of`
            layer=worst[1],
            **worst[2],
        )
    # mscale: YaRN's attention scaling would stretch cosines and sines, and V4 has none
    yield judged("length of (cos, sin) off 1, worst of all tables", longest, at_most(EDGE))


def words(table: Table) -> str:
    """Name a table."""
    return f"theta {table.theta:g}" + ("" if table.yarn is None else f" with YaRN x{table.yarn.factor:g}")


def golden(config: ModelConfig, device: torch.device) -> Iterator[Finding]:
    """Build the published tables with the run's code, whatever this checkpoint's are."""
    for (theta, yarn), by_position in GOLDEN.items():
        kind = LayerKind.SWA if yarn is None else LayerKind.CSA
        dims = {"head_dim": 512, "index_head_dim": 128, "qk_rope_head_dim": GOLDEN_DIM}
        thetas = {"rope_theta": theta} if yarn is None else {"compress_rope_theta": theta, "rope_scaling": yarn}
        rotation = Rotation(layer_frequencies(replace(config, **dims, **thetas), kind).to(device))  # type: ignore[arg-type]
        table, which = Table.of(GOLDEN_DIM, theta, yarn), list(GOLDEN_PAIRS)
        worst, where = 0.0, 0
        for position in POSITIONS:
            cos, sin = (f64(part)[0, which] for part in rotation.at(position, 1))
            right = np.array(by_position.get(position, [(1.0, 0.0)] * len(which)))
            allowed = table.allowed(np.array([position]))[0, which]
            share = float((apart(cos, sin, np.arctan2(right[:, 1], right[:, 0])) / allowed).max())
            if not share <= worst:
                worst, where = share, position
        original = "" if yarn is None else f" from {yarn.original_max_position_embeddings}"
        what = f"golden angles, {words(table)}{original}: over what fp32 allows, worst"
        yield judged(what, worst, at_most(1), position=where, positions=list(POSITIONS), pairs=which)


def op(ops: Ops, model: Transformer, dtype: torch.dtype, rounding: float, seed: int) -> Iterator[Finding]:
    """Feed the rotation known vectors."""
    x = torch.arange(1.0, 13.0, device=model.device)[None].to(dtype)  # 4 dims that stay, 4 pairs
    quarter = torch.zeros(1, 4, device=model.device), torch.ones(1, 4, device=model.device)
    got = [*f64(ops.rotate(x, *quarter))[0].tolist(), *f64(ops.rotate(x[:, None], *quarter))[0, 0].tolist()]
    right = [1.0, 2, 3, 4, -6, 5, -8, 7, -10, 9, -12, 11]
    wrong = sum(a != b for a, b in zip(got, right * 2, strict=True))
    what = "golden quarter turn: neighbours (a, b) to (-b, a), numbers that are not"
    yield judged(what, wrong, exactly(0), run=got[:12], expected=right)
    dim = model.config.qk_rope_head_dim
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(POSITIONS), dim, generator=generator).to(model.device, dtype)
    for kind, layer in {kind: layer for layer, kind in enumerate(model.config.layer_kinds)}.items():
        turns = [rotations_of(model, layer)[0].at(position, 1) for position in POSITIONS]
        cos, sin = (torch.cat([turn[i] for turn in turns]) for i in (0, 1))
        back = ops.rotate(ops.rotate(rows, cos, sin), cos, -sin)
        off = np.abs(pairs(f64(back), dim) - pairs(f64(rows), dim)) / np.abs(pairs(f64(rows), dim))
        # Each way rounds a pair once, by a share of its length
        share = float(off.max()) / (2 * rounding * (1 + rounding) + 16 * U)
        yield judged(f"inverse restores, {kind.name} layers: over what rounding allows, worst", share, at_most(1))
