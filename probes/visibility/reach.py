"""What an attention layer can see, by experiment: change one row of its input and look which rows of its output move.

Each layer is run by itself, on the input that it had in a run of the whole model: its output's rows mix nowhere else,
and all shapes stay the same, so an output row that does not see the changed token keeps every bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.cache.layers import LayerCache
from model.config import LayerKind, ModelConfig
from model.observe import sites
from model.observe.observer import listening
from model.transformer import Transformer


class Reach(NamedTuple):
    """Which output rows moved when one input row changed, and which had to."""

    layer: int
    positions: tuple[int, ...]  # of the input rows that were changed, one at a time
    moved: Tensor  # [p, t] bool
    window: Tensor  # [p, t] bool: row t has the changed token in its window
    expected: Tensor  # [p, t] bool: in its window, or in an entry that it attends to


def reach(model: Transformer, config: ModelConfig, layer: int, inputs: Tensor, positions: Sequence[int]) -> Reach:
    """Change row p of `inputs` [t, hidden] for each p of `positions`, in one layer, all t tokens in one call."""
    before, chosen_before = _attention(model, layer, inputs)
    moved, expected = [], []
    window = in_window(config, positions, len(inputs))
    for p, near in zip(positions, window, strict=True):
        changed = inputs.clone()
        changed[p] = -changed[p]  # as large as before: nothing saturates, and no token has this input
        after, chosen_after = _attention(model, layer, changed)
        moved.append((after != before).flatten(1).any(1))
        seen = torch.zeros_like(near)
        for entry in entries_of(config, layer, p):
            finished = entry < (torch.arange(len(inputs)) + 1) // config.ratio(layer)
            if chosen_before is not None and chosen_after is not None:
                finished &= (chosen_before == entry).any(1) | (chosen_after == entry).any(1)
            seen |= finished
        expected.append(near | seen)
    return Reach(layer, tuple(positions), torch.stack(moved), window, torch.stack(expected))


def in_window(config: ModelConfig, positions: Sequence[int], tokens: int) -> Tensor:
    """Which of `tokens` rows have a position in their window, itself included: [p, t] bool."""
    behind = torch.arange(tokens) - torch.tensor(positions)[:, None]
    return (behind >= 0) & (behind < config.sliding_window)


def entries_of(config: ModelConfig, layer: int, position: int) -> tuple[int, ...]:
    """The compressed entries that hold something of the token at `position`.

    Its own block's; with overlap (CSA) the next block's too, which pools this one's first series.
    """
    match config.layer_kind(layer):
        case LayerKind.SWA:
            return ()
        case LayerKind.HCA:
            return (position // config.ratio(layer),)
        case LayerKind.CSA:
            own = position // config.ratio(layer)
            return own, own + 1


@torch.inference_mode()
def _attention(model: Transformer, layer: int, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output before the inverse rotation [t, heads, head_dim], and the selection [t, k] of a CSA layer, on the CPU."""
    seen: dict[str, Tensor] = {}
    listeners = {
        sites.MIXED: lambda _, x: seen.update(mixed=x.cpu()),
        sites.SELECTED: lambda _, x: seen.update(selected=x.cpu()),
    }
    with listening(model, listeners):
        state = model.new_state(len(inputs), len(inputs))
        cache = state.layers[layer]
        assert isinstance(cache, LayerCache)
        tokens = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        model.blocks[layer].attention(inputs, model.call(tokens, 0), cache)
    return seen["mixed"], seen.get("selected")
