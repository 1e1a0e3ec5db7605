"""One layer of CoDA-GQA-L beside the package `coda-gqa-l`: the same weights, the same tokens, projections included."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.rope import reference as rope
from model.cache.gqa import all_heads
from model.variants.coda import CodaCache
from model.variants.coda_attention import Differential, Tokens, prefill, step
from model.variants.coda_settings import CodaSettings
from scripts.bench.pairs import Pair

PACKAGE = "coda_gqa_l"
BASE = 10_000.0
STEPS = 8  # decoded tokens per call
EPS = 1e-6


class CodaLayer:
    """A layer by this project: projections, rotation, differential attention to a CoDA cache.

    Parameters
    ----------
    heads, kv_heads, d
        Of the layer, which is ``heads * d`` wide.
    settings
        Of its cache.
    seed
        Of its weights.

    """

    def __init__(self, heads: int, kv_heads: int, d: int, settings: CodaSettings, seed: int = 0) -> None:
        g, width = torch.Generator().manual_seed(seed), heads * d
        self.sizes = (heads, kv_heads, d)
        # rows of queries, keys, values, lambda and gate: one product
        self.rows = [heads * d, kv_heads * d, kv_heads * d, heads, 1]
        self.weight = torch.randn(sum(self.rows), width, generator=g) * width**-0.5
        self.bias = torch.zeros(sum(self.rows))
        self.bias[-1 - heads :] = torch.randn(heads + 1, generator=g)
        self.output = torch.randn(width, width, generator=g) * width**-0.5
        self.theta = torch.randn(heads, d // 2, generator=g)
        self.differential = Differential(self.theta.cos(), self.theta.sin(), torch.ones(d), EPS)
        self.freqs, self.settings, self.eta_logit = rope.frequencies(d, BASE), settings, torch.full((kv_heads,), -3.0)

    def cache(self) -> CodaCache:
        """Return an empty cache."""
        return CodaCache(
            self.settings, all_heads(self.sizes[1]), self.sizes[2], self.eta_logit, torch.float32, torch.device("cpu")
        )

    def tokens(self, x: Tensor, first: int) -> Tokens:
        """What the cache is given for x [t, width] at positions ``first ..``."""
        heads, kv_heads, d = self.sizes
        rotated, v, lam, gates = linear(x, self.weight, self.bias).split(
            [self.rows[0] + self.rows[1], *self.rows[2:]], 1
        )
        turn = torch.complex(*rope.angles(torch.arange(first, first + len(x)), self.freqs))[:, None]
        pairs = torch.view_as_complex(rotated.unflatten(1, (heads + kv_heads, d // 2, 2)).contiguous())
        q, k = torch.view_as_real(pairs * turn).flatten(-2).split([heads, kv_heads], 1)
        return Tokens(q, k, v.unflatten(1, (kv_heads, d)), gates[:, 0].sigmoid(), lam.sigmoid())

    def prefill(self, x: Tensor, cache: CodaCache, block: int) -> Tensor:
        """Read x [t, width] in blocks, each from its projections to its output, as a model's chunks do: [t, width]."""
        out = torch.empty_like(x)
        for part, place in zip(x.split(block), out.split(block), strict=True):
            mixed = prefill(cache, self.tokens(part, cache.position), self.differential, block)
            torch.mm(mixed.flatten(1), self.output.T, out=place)
        return out

    def step(self, x: Tensor, cache: CodaCache) -> Tensor:
        """Decode one token x [1, width]: [1, width]."""
        return linear(step(cache, self.tokens(x, cache.position), self.differential).flatten(1), self.output)


def package_layer(layer: CodaLayer) -> Any:
    """Return the package's module with the weights of `layer`, or None where the package is not installed."""
    if find_spec(PACKAGE) is None:
        return None
    heads, kv_heads, d = layer.sizes
    settings = layer.settings
    module = (
        import_module(PACKAGE)
        .CoDAGQALandmarkPerf2(
            embed_dim=heads * d,
            num_heads=heads,
            num_kv_heads=kv_heads,
            window=settings.window,
            num_landmarks_exact=settings.exact,
            num_landmarks_summary=settings.summary,
            rope_base=BASE,
            eps=EPS,
            mem_init="zeros",
        )
        .eval()
    )
    q, k, v, lam, gate = layer.weight.split(layer.rows)
    *_, lam_bias, gate_bias = layer.bias.split(layer.rows)
    given = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_proj.weight": layer.output}
    given |= {"lambda_proj.weight": lam, "write_proj.weight": gate, "theta": layer.theta}
    given |= {"lambda_proj.bias": lam_bias, "write_proj.bias": gate_bias}
    for name, part in given.items():  # the same memory, so that neither side drives the other's weights out of a cache
        module.get_parameter(name).data = part
    return module


def settings(window: int, exact: int, summary: int) -> CodaSettings:
    """Published rules with the package's own order of candidates, so that both sides remember the same."""
    published = CodaSettings.published(window=window, exact=exact, summary=summary, rope="interleaved")
    fields = {name: getattr(published, name) for name in published.__slots__}
    return CodaSettings(**fields | {"candidate_order": "unsorted", "memory_init": "zeros"})


def prompt(layer: CodaLayer, n: int, block: int) -> Pair:
    """A prompt of n tokens from an empty cache."""
    x, module = _drawn(layer, n), package_layer(layer)

    def ours() -> Tensor:
        return layer.prefill(x, layer.cache(), block)

    def theirs() -> Tensor:
        state = module.init_state(batch_size=1, device=x.device, dtype=x.dtype)
        out: Tensor = module.prefill_chunked(x[None], state, block_size=block)[0][0]
        return out

    return Pair(f"prompt of {n} tokens", "coda", ours, "package", None if module is None else theirs)


def decoding(layer: CodaLayer, n: int, block: int) -> Pair:
    """`STEPS` tokens decoded after a prompt of n, on and on."""
    x, more, module = _drawn(layer, n), _drawn(layer, STEPS, seed=1), package_layer(layer)
    cache = layer.cache()
    layer.prefill(x, cache, block)
    state = None
    if module is not None:
        state = module.init_state(batch_size=1, device=x.device, dtype=x.dtype)
        module.prefill_chunked(x[None], state, block_size=block)

    def ours() -> Tensor:
        return torch.cat([layer.step(token, cache) for token in more.split(1)])

    def theirs() -> Tensor:
        return torch.cat([module.step(token[None], state)[0][0] for token in more.split(1)])

    return Pair(f"{STEPS} tokens after {n}", "coda", ours, "package", None if module is None else theirs)


def _drawn(layer: CodaLayer, n: int, seed: int = 0) -> Tensor:
    heads, _, d = layer.sizes
    return torch.randn(n, heads * d, generator=torch.Generator().manual_seed(seed))
