"""Which parameters change nothing when they are changed: a stronger question than whether they are read."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kernels.formats.stored import Dense, Weight
from model.errors import Tripwire
from model.observe import sites
from model.observe.observer import listening
from model.transformer import Transformer
from probes.shared.held import Held, find
from probes.subject import run_tokens


def without_effect(
    model: Transformer, names: Sequence[str], tokens: list[int], chunk: int, seed: int
) -> Iterator[tuple[str, bool]]:
    """Change each parameter in turn, and compare bit by bit.

    A parameter of a layer is changed alone, and the layer runs again on the streams that it got in an unchanged run:
    all tokens in one call, from an empty cache. A parameter outside of the layers is judged by the logits of the last
    token of a whole run. A tripwire that goes off is an effect too. Every parameter is put back.

    Yields
    ------
    tuple[str, bool]
        A name, and whether its change changed nothing.

    """
    generator = torch.Generator().manual_seed(seed)
    inputs = _inputs(model, tokens, chunk)
    ids = torch.tensor(tokens, device=model.device)
    for layer, block in enumerate(model.blocks):

        def layer_alone(layer: int = layer, block: Callable[..., Tensor] = block) -> Tensor:
            cache = model.new_state(len(tokens), len(tokens)).layers[layer]
            return block(inputs[layer], model.call(ids, 0), cache)

        yield from _changed(
            model, [name for name in names if name.startswith(f"layers.{layer}.")], layer_alone, generator
        )

    def whole() -> Tensor:
        return model.logits(run_tokens(model, tokens, chunk)[0][-1:])

    yield from _changed(model, [name for name in names if not name.startswith("layers.")], whole, generator)


def _inputs(model: Transformer, tokens: list[int], chunk: int) -> list[Tensor]:
    """Streams [t, s, hidden] that enter each layer."""
    entering: list[list[Tensor]] = [[] for _ in range(len(model.blocks) + 1)]

    def embedded(layer: int | None, x: Tensor) -> None:
        del layer
        entering[0].append(x[:, None].repeat(1, model.config.hc_mult, 1))

    def streams(layer: int | None, x: Tensor) -> None:
        assert layer is not None
        entering[layer + 1].append(x.clone())

    with listening(model, {sites.EMBEDDED: embedded, sites.STREAMS: streams}):
        run_tokens(model, tokens, chunk)
    return [torch.cat(parts) for parts in entering[:-1]]


def _changed(
    model: Transformer, names: Sequence[str], run: Callable[[], Tensor], generator: torch.Generator
) -> Iterator[tuple[str, bool]]:
    with torch.inference_mode():
        before = run()
        for name in names:
            held = find(model, name)
            if held is not None:
                yield name, _same(held, run, before, generator)


def _same(held: Held, run: Callable[[], Tensor], before: Tensor, generator: torch.Generator) -> bool:
    value = held.value
    held.put(_another(value, generator))
    try:
        return torch.equal(run(), before)
    except Tripwire:
        return False
    finally:
        held.put(value)


def _another(value: Weight | Tensor, generator: torch.Generator) -> Weight | Tensor:
    """Other numbers of the same form: rows in another order where numbers are packed, else noise of their own size."""
    if isinstance(value, Dense):
        return Dense(_noisy(value.data, generator))
    if not isinstance(value, Tensor):
        bits = value.data.view(torch.uint8)
        return value._replace(data=bits.roll(1, 0).view(value.data.dtype))
    return _noisy(value, generator) if value.is_floating_point() else value.roll(1, 0)


def _noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator).to(x.device)
    return (x + noise * x.float().abs().mean().clamp(min=1)).to(x.dtype)
