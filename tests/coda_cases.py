"""CoDA caches of a few slots, and random tokens for them."""

from dataclasses import replace

import torch

from fathom.model.cache.gqa import all_heads
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Differential, Tokens, step
from fathom.model.variants.coda_settings import CodaSettings

CPU = torch.device("cpu")
HEADS, GROUPS, D = 4, 2, 8
ETA = torch.tensor([-3.0, -1.0])  # rates of 0.0474 and 0.2689, by KV head


def published(window, exact, summary, **changes):
    return replace(CodaSettings.published(window=window, exact=exact, summary=summary, rope="half"), **changes)


def corrected(window, exact, summary, **changes):
    return CodaSettings(window=window, exact=exact, summary=summary, rope="half", **changes)


def cache_of(settings, groups=GROUPS, d=D, dtype=torch.float32, seed=0):
    return CodaCache(settings, all_heads(groups), d, ETA[:groups], dtype, CPU, seed=seed)


def random_tokens(t, seed=0, heads=HEADS, groups=GROUPS, d=D):
    """Values resemble each other more or less; gates on both sides of the thresholds."""
    g = torch.Generator().manual_seed(seed)
    pool = torch.randn(6, groups, d, generator=g)
    v = pool[torch.randint(6, (t,), generator=g)] + torch.rand(t, 1, 1, generator=g) * torch.randn(
        t, groups, d, generator=g
    )
    q, k = torch.randn(t, heads, d, generator=g), torch.randn(t, groups, d, generator=g)
    return Tokens(q, k, v, torch.rand(t, generator=g), torch.rand(t, heads, generator=g))


def rows(tokens, where):
    return Tokens(*(None if part is None else part[where] for part in tokens))


def steps(cache, tokens, differential):
    return torch.cat([step(cache, rows(tokens, slice(i, i + 1)), differential) for i in range(len(tokens.q))])


def mechanism(seed=0):
    theta = torch.randn(HEADS, D // 2, generator=torch.Generator().manual_seed(seed))
    return Differential(theta.cos(), theta.sin(), torch.linspace(0.5, 1.5, D), 1e-6)
