"""Judging the reach of attention layers, and drawing it."""

import torch
from torch import Tensor

from model.config import LayerKind, ModelConfig
from probes.finding import JSON, Finding, HeatMap, Table, at_most, exactly, judged
from probes.visibility.reach import Reach

# A key whose share of a token's softmax is below the last bit of all numbers of the output moves nothing: with bf16 and
# a few hundred numbers in an output row, about 1e-5. Trained models give that to few keys that they attend to at all.
UNMOVED = 0.01
BIN = 16  # tokens to a cell of the map


def reached(one: Reach) -> list[Finding]:
    """Judge the reach of one layer."""
    rows = torch.arange(one.moved.shape[1])
    earlier = rows < torch.tensor(one.positions)[:, None]  # [p, t]
    beyond = one.moved & ~one.expected
    future, past = beyond & earlier, beyond & ~earlier
    lost = one.expected & ~one.moved
    share = int(lost.sum()) / int(one.expected.sum())

    def first(pairs: Tensor) -> dict[str, JSON]:
        if not pairs.any():
            return {}
        p, t = pairs.nonzero()[0].tolist()
        return {"token changed": one.positions[p], "row": t}

    return [
        judged(
            "rows moved by a token that comes after them",
            int(future.sum()),
            exactly(0),
            layer=one.layer,
            **first(future),
        ),
        judged(
            "rows moved by a past token outside of their window and attended entries",
            int(past.sum()),
            exactly(0),
            layer=one.layer,
            **first(past),
        ),
        judged(
            "share of rows not moved by a token of their window or attended entries",
            share,
            at_most(UNMOVED),
            layer=one.layer,
            **first(lost),
        ),
    ]


def staircase(config: ModelConfig, one: Reach) -> Table:
    """How many entries rows of an HCA layer saw, at the ends of blocks."""
    ratio, tokens = config.ratio(one.layer), one.moved.shape[1]
    ends = [end for end in range(ratio, tokens + 1, ratio) if end - 1 <= max(one.positions)]
    rows = sorted({t for end in ends for t in (end - 2, end - 1, end) if t < tokens})
    block = torch.tensor(one.positions) // ratio
    by_entry = one.moved & ~one.window  # [p, t]: the window cannot explain it
    table = []
    for t in rows:
        seen = block[by_entry[:, t]].unique().numel()
        table.append((t, (t + 1) // ratio, seen))
    return Table(
        f"Entries of {ratio} tokens that a row of layer {one.layer} (HCA) sees",
        ("position t", "finished blocks, (t + 1) // ratio", "blocks whose tokens moved row t from outside its window"),
        table,
        "A block's entry is seen from its last token on, and not from the one before it.",
    )


def picture(config: ModelConfig, one: Reach) -> HeatMap:
    """Share of pairs of a changed token and a row in which the row moved."""
    tokens = one.moved.shape[1]
    starts = torch.arange(0, tokens, BIN)
    moved = one.moved.float().split(BIN, 1)
    columns = torch.stack([part.mean(1) for part in moved], 1)  # [p, bins]
    groups = torch.tensor(one.positions) // BIN
    values = [columns[groups == group].mean(0).tolist() for group in groups.unique()]
    kind = config.layer_kind(one.layer)
    if kind is LayerKind.HCA:
        note = "The band along the diagonal is the window. To its right rows see the token through its block's entry,"
        note += " from the end of the block on: a stair of one step per block."
    else:
        note = "The band along the diagonal is the window. Beyond it a row moves where it selected an entry that holds"
        note += " something of the token."
    return HeatMap(
        f"Rows of layer {one.layer} ({kind.name}) that move when one token changes",
        "row of the output, from position",
        "token changed, from position",
        tuple(str(int(start)) for start in starts),
        tuple(str(int(group) * BIN) for group in groups.unique()),
        values,
        note + " Left of the diagonal lies the past, where nothing may move.",
    )
