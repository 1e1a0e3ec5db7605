"""Two bounded states of one model made into one: `model.variants.coda_merge`, layer by layer.

Nothing has attended from one document to the other: the second one's keys and values are those of a text that nothing
precedes, its first token (BOS, where the tokenizer puts one) included. What either document's banks had forgotten stays
forgotten, and what there is no room for goes.
"""

import torch

from fathom.kernels.rope.reference import angles
from fathom.model.architectures import Config
from fathom.model.errors import StateError
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.rope import frequencies
from fathom.model.llama.transformer import LlamaTransformer
from fathom.model.state import State
from fathom.model.variants.choice import GroupedCoda
from fathom.model.variants.coda_merge import Kept, merge_caches
from fathom.model.variants.grouped import CodaLayer
from fathom.runtime.load import AnyLoaded, LoadedLlama


def check_family(config: Config, where: str) -> None:
    """Refuse states of DeepSeek-V4, which cannot be merged: StateError naming `where`."""
    if not isinstance(config, LlamaConfig):
        raise StateError(f"{where}: states of DeepSeek-V4 cannot be merged, only those of Llama-family models")


def mergeable(loaded: AnyLoaded, where: str) -> LoadedLlama:
    """Return the model when its states can be merged in this run's settings: StateError otherwise, naming the layer.

    Every layer must keep the bounded cache of grouped heads, by the corrected rules: the published ones average the
    second component of each rotated pair without the first, and no rotation moves such an average.
    """
    check_family(loaded.model.config, where)
    assert isinstance(loaded.model, LlamaTransformer), "of that family"
    formats = loaded.model.arithmetic.formats
    for layer in range(loaded.model.config.num_hidden_layers):
        variant = formats.variant(layer)
        if not isinstance(variant, GroupedCoda):
            raise StateError(
                f"{where}: layer {layer} keeps {variant}; only bounded caches of grouped heads can be merged"
            )
        if variant.published:
            raise StateError(
                f"{where}: layer {layer} has published=1, which averages one half of each rotated pair: no such average"
                " can be given another position"
            )
    return loaded


def merge(loaded: LoadedLlama, first: State, second: State, shift: int | None = None) -> Kept:
    """Put `second` behind `first`, which becomes the state of both; `second` is left as it is.

    Parameters
    ----------
    loaded
        What made both, of which `mergeable` has been asked.
    first, second
        Any tokens of each, in equal settings. `first` must be made for as many positions as both have.
    shift
        Positions that the second document moves by. None: the tokens of the first one. 0: both stay where they are,
        which takes a second document that is no shorter; to measure what moving it is worth.

    Returns
    -------
    Kept
        What is in the merged state, summed over layers.

    Raises
    ------
    StateError
        Together they have more tokens than the model or `first` has positions.

    """
    moved = first.position if shift is None else shift
    assert shift is None or (shift == 0 and second.position >= first.position), f"shift {shift}"
    total, most = moved + second.position, min(loaded.model.config.max_position_embeddings, first.max_context)
    if total > most:
        raise StateError(f"{first.position} and {second.position} tokens do not fit into {most} positions")
    turn = angles(
        torch.tensor([moved], device=loaded.model.device), frequencies(loaded.model.config).to(loaded.model.device)
    )
    counted = []
    for layer, (a, b) in enumerate(zip(first.layers, second.layers, strict=True)):
        variant = loaded.model.arithmetic.formats.variant(layer)
        assert isinstance(a, CodaLayer), f"layer {layer}"
        assert isinstance(b, CodaLayer), f"layer {layer}"
        assert isinstance(variant, GroupedCoda), f"layer {layer}"
        counted.append(merge_caches(a.coda, b.coda, moved, turn, variant.block))
        a.position = total
    first.position = total
    return Kept(*map(sum, zip(*counted, strict=True)))
