"""Both variants in runs of the model: exact until something is evicted, put back to the bit, and no drift."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.config import LayerKind, ModelConfig
from model.errors import StateError
from model.state import State
from model.transformer import Transformer
from probes.finding import Finding, broken, exactly, judged
from probes.probe import Progress
from probes.variants.drawn import off
from probes.variants.grouped import SAME, Drift, drift

DIVERGENCE = "KL of the logits from the full cache's"
CHUNK = 64  # tokens of a call, where it does not matter
SMALL = "coda:window=9,exact=4,summary=4"  # of which everything is evicted within a prompt of a few hundred tokens


def kept_whole(config: ModelConfig, length: int) -> tuple[str, ...]:
    """Rules by which coda's windows hold just the entries of `length` tokens, layer by layer."""
    layers = [layer for layer, kind in enumerate(config.layer_kinds) if kind is not LayerKind.SWA]
    fits = {layer: max(1, length // config.ratio(layer)) for layer in layers}
    return tuple(f"{layer}=coda:window={window},exact=4,summary=4" for layer, window in fits.items())


def logits(model: Transformer, ids: Tensor, sizes: Sequence[int]) -> tuple[Tensor, State]:
    """Logits [t, vocab] of a sequence that comes in calls of these sizes, and the state."""
    state = model.new_state(len(ids), max(sizes))
    return torch.cat([model.logits(model(part, state)) for part in ids.split(list(sizes))]), state


def orders(length: int, chunks: Sequence[int], tail: int) -> Iterator[tuple[str, list[int]]]:
    """Ways to cut a prompt: calls of each size, and single tokens at its end."""
    for chunk in chunks:
        if chunk > 1:
            yield f"calls of {chunk}", [len(part) for part in torch.empty(length).split(chunk)]
    yield f"one call, then {tail} steps", [length - tail, *[1] * tail]


def exact(full: Transformer, coda: Transformer, ids: Tensor, chunks: Sequence[int], tail: int) -> Iterator[Finding]:
    """While no entry has left a window, coda is the full cache, however the prompt comes."""
    worst = (0.0, "")
    for name, sizes in orders(len(ids), chunks, tail):
        wanted, found = (logits(model, ids, sizes)[0] for model in (full, coda))
        distance = off(found, wanted.double())
        if not distance <= worst[0]:  # NaN is worst
            worst = distance, name
    what = f"V4, coda, windows of all entries of {len(ids)} tokens: logits, distance from the full cache"
    yield judged(what, worst[0], SAME, worst=worst[1], of="the largest logit")


def restored(model: Transformer, name: str, ids: Tensor, tail: int) -> Iterator[Finding]:
    """A state that is put back goes on to the bit."""
    position, chunk = len(ids) - tail, CHUNK
    state, other = (model.new_state(len(ids), chunk) for _ in range(2))
    for part in ids[:position].split(chunk):
        model(part, state)
    what = f"V4, {name}, saved at {position} and put back: tokens whose rows differ"
    try:
        for here, there in zip(state.layers, other.layers, strict=True):
            there.restore(position, {part: tensor.clone() for part, tensor in here.tensors(position).items()})
    except StateError as error:  # what a cache gave, a cache does not take
        yield broken(what, str(error))
        return
    other.position = position
    wrong = sum(not torch.equal(model(one, state), model(one, other)) for one in ids[position:].split(1))
    yield judged(what, wrong, exactly(0), of=tail)


def drifts(full: Transformer, variants: dict[str, Transformer], ids: Tensor, progress: Progress) -> list[Drift]:
    """Read a document with each variant: divergence of each token's logits from the full cache's."""
    sizes = [len(part) for part in ids.split(CHUNK)]
    whole = logits(full, ids, sizes)[0].double().log_softmax(-1)
    found: list[Drift] = []
    for name, model in variants.items():
        progress(len(found) / len(variants), f"{len(ids)} tokens with {name}")
        other = logits(model, ids, sizes)[0].double().log_softmax(-1)
        found.append(drift(name, (whole.exp() * (whole - other)).sum(-1).cpu()))
    return found
