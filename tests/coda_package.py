"""The package `coda-gqa-l` beside this CoDA cache: one set of weights, the same tokens, every field compared."""

from dataclasses import replace

import pytest
import torch
from coda_gqa_l import CoDAGQALandmarkPerf2

from fathom.kernels.rope import reference as rope
from fathom.model.cache.gqa import all_heads
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Differential, Tokens, prefill, step
from fathom.model.variants.coda_settings import CodaSettings

OUTPUTS, STATES = 2e-5, 5e-5
BASE = 10_000.0
CPU = torch.device("cpu")


def rotated(x, positions, *, interleaved):
    """RoPE in the pairing asked for, in fp32; x [t, h, D]."""
    cos, sin = rope.angles(positions, rope.frequencies(x.shape[-1], BASE))
    if interleaved:
        return rope.rotate(x, cos, sin)
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Both:
    """The package and this cache, with one set of weights, fed the same tokens."""

    def __init__(self, seed, *, heads, groups, d, growth=(None, None), norm, policy="gated", settings):
        g = torch.Generator().manual_seed(seed)
        start = dict(zip(("min_landmarks_exact", "min_landmarks_summary"), growth, strict=True))
        torch.manual_seed(seed)
        self.oracle = CoDAGQALandmarkPerf2(
            embed_dim=heads * d,
            num_heads=heads,
            num_kv_heads=groups,
            window=settings.window,
            num_landmarks_exact=settings.exact,
            num_landmarks_summary=settings.summary,
            **start,
            expansion_t_max=settings.growth_horizon,
            write_policy=policy,
            write_gate_threshold_exact=settings.gate_exact,
            write_gate_threshold_summary=settings.gate_summary,
            exact_match_threshold=settings.hit,
            exact_novelty_threshold=settings.novelty,
            exact_refresh_on_hit=settings.refresh_on_hit,
            exact_candidates_per_block=settings.exact_candidates,
            summary_candidates_per_block=settings.summary_candidates,
            summary_overwrite_on_insert=settings.overwrite_on_insert,
            mem_init="zeros" if settings.memory_init == "zeros" else "random_normal",
            mask_unused_memory=settings.mask_unused,
            head_norm_mode=norm,
            rope_interleaved=settings.rope == "interleaved",
            collect_metrics=True,
        ).eval()
        for name, parameter in self.oracle.named_parameters():
            if name in ("theta", "lambda_proj.bias", "write_proj.bias", "summary_eta_logit", "head_norm.weight"):
                parameter.data = torch.randn(parameter.shape, generator=g)
            elif name == "write_proj.weight":  # zero in a new module: all gates would be equal
                parameter.data = torch.randn(parameter.shape, generator=g) / (heads * d) ** 0.5
        self.state = self.oracle.init_state(batch_size=1, device=CPU, dtype=torch.float32)
        settings = replace(settings, exact_at_start=growth[0], summary_at_start=growth[1])
        self.cache = CodaCache(settings, all_heads(groups), d, self.oracle.summary_eta_logit.data, torch.float32, CPU)
        for buffer, theirs in ((self.cache.keys, self.state.k_buf), (self.cache.values, self.state.v_buf)):
            buffer.copy_(theirs[0])  # the slots' random content
        for bank in (self.cache.exact, self.cache.summary):
            bank.targets.refresh(torch.arange(bank.size))
        weight = self.oracle.head_norm.weight.data if norm == "full" else None
        theta = self.oracle.theta.data
        self.differential = Differential(theta.cos(), theta.sin(), weight, 1e-6)
        self.gated = policy == "gated"

    def tokens(self, x):
        """What our cache is given for x [t, E]."""
        module, positions = self.oracle, torch.arange(self.cache.position, self.cache.position + x.shape[0])
        d, interleaved = module.head_dim, self.cache.settings.rope == "interleaved"
        q, k, v = (p(x).unflatten(-1, (-1, d)) for p in (module.q_proj, module.k_proj, module.v_proj))
        q, k = (rotated(part, positions, interleaved=interleaved) for part in (q, k))
        gates = module.write_proj(x).sigmoid()[:, 0] if self.gated else None
        return Tokens(q, k, v, gates, module.lambda_proj(x).sigmoid())

    def projected(self, out):
        return self.oracle.o_proj(out.flatten(1))

    @torch.no_grad()
    def prefill(self, x, block):
        ours = self.projected(prefill(self.cache, self.tokens(x), self.differential, block))
        theirs, _ = self.oracle.prefill_chunked(x[None], self.state, block_size=block)
        return ours, theirs[0]

    @torch.no_grad()
    def step(self, x):
        ours = self.projected(step(self.cache, self.tokens(x), self.differential))
        theirs, _ = self.oracle.step(x[None], self.state)
        return ours, theirs[0]

    def same_state(self, *, as_sets=False):
        """Compare every field of the package's state; its ring starts anywhere, so both are read oldest first."""
        cache, state, window = self.cache, self.state, self.cache.settings.window
        held = min(cache.position, window)
        assert (state.pos, state.recent_filled) == (cache.position, held)
        assert (state.active_exact, state.active_summary) == (cache.exact.active, cache.summary.active)
        ours = torch.arange(cache.position - held, cache.position) % window
        theirs = (state.recent_idx + torch.arange(held)) % window
        close(cache.keys[:, ours], state.k_buf[0][:, theirs], STATES)
        close(cache.values[:, ours], state.v_buf[0][:, theirs], STATES)
        close(cache.gates[ours], state.g_recent[0][theirs], STATES)
        assert cache.used[:window].sum() == state.allowed[0, :window].sum() == held
        size = cache.exact.size
        used, last_used = state.allowed[0, window : window + size], state.mem_last_exact[0]
        ours = theirs = torch.arange(size)
        if as_sets:
            ours, theirs = by_age(cache.exact.used, cache.exact.last_used), by_age(used, last_used)
        assert torch.equal(cache.exact.used[ours], used[theirs])
        assert torch.equal(cache.exact.last_used[ours], last_used[theirs])
        close(cache.exact.keys[:, ours], state.k_buf[0][:, window + theirs], STATES)
        close(cache.exact.values[:, ours], state.v_buf[0][:, window + theirs], STATES)
        assert torch.equal(cache.summary.used, state.allowed[0, window + size :])
        close(cache.summary.keys, state.k_buf[0][:, window + size :], STATES)
        close(cache.summary.values, state.v_buf[0][:, window + size :], STATES)
        if size:
            close(cache.exact.targets.data[:, ours], state._exact_v_norm[0][:, theirs], STATES)
        if cache.summary.size:
            close(cache.summary.targets.data, state._sum_lf_k_norm[0], STATES)
        assert cache.metrics() == pytest.approx(state.metrics, rel=1e-6)


def by_age(used, last_used):
    """Slots in use, by the position of their last use."""
    slots = used.nonzero()[:, 0]
    return slots[last_used[slots].argsort()]


def close(ours, theirs, bound):
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    assert not ours.numel() or (ours - theirs).abs().max() <= bound


def one_of(g, *choices):
    return choices[int(torch.randint(len(choices), (), generator=g))]


def configuration(seed, **changes):
    """A random configuration, with thresholds that tokens of `stream` fall on both sides of."""
    g = torch.Generator().manual_seed(1000 + seed)
    heads, groups = one_of(g, (1, 1), (4, 1), (4, 2), (4, 4), (6, 3))
    exact, summary = one_of(g, 0, 3, 9, 20), one_of(g, 0, 2, 7, 70)
    novelty = one_of(g, 0.3, 0.5, 0.7)
    settings = replace(
        CodaSettings.published(window=one_of(g, 1, 4, 12), exact=exact, summary=summary, rope="half"),
        rope=one_of(g, "interleaved", "half"),
        gate_exact=one_of(g, 0.1, 0.4),
        gate_summary=one_of(g, 0.05, 0.3),
        novelty=novelty,
        hit=one_of(g, 0.9, novelty),
        refresh_on_hit=one_of(g, False, True),
        exact_candidates=one_of(g, 2, 8, 8, 0),
        summary_candidates=one_of(g, 5, 64, 64, 0),
        overwrite_on_insert=one_of(g, True, True, False),
        memory_init=one_of(g, "zeros", "normal"),
        mask_unused=one_of(g, True, True, True, False),
        growth_horizon=one_of(g, 60, 1000, 0),
    )
    growth = one_of(g, (None, None), (min(exact, 2), None), (min(exact, 3), min(summary, 1)))
    made = {"heads": heads, "groups": groups, "d": one_of(g, 4, 8, 16), "growth": growth}
    made |= {"norm": one_of(g, "full", "identity"), "policy": one_of(g, "gated", "gated", "none")}
    return made | {"settings": settings} | changes


def stream(seed, t, width):
    """Tokens that resemble each other more or less: 8 directions, with noise."""
    g = torch.Generator().manual_seed(2000 + seed)
    pool = torch.randn(8, width, generator=g)
    noise = torch.rand(t, 1, generator=g) * torch.randn(t, width, generator=g)
    return pool[torch.randint(8, (t,), generator=g)] + noise


def calls(seed, tokens):
    """A random sequence of calls over `tokens`: steps, and blocks of any size below and above the window."""
    g, done = torch.Generator().manual_seed(3000 + seed), 0
    while done < tokens:
        steps = bool(torch.randint(2, (), generator=g))
        n = min(tokens - done, int(torch.randint(1, 12 if steps else 60, (), generator=g)))
        yield steps, slice(done, done + n), int(torch.randint(1, 40, (), generator=g))
        done += n


def run(both, seed, tokens=120, **comparison):
    x = stream(seed, tokens, both.oracle.embed_dim)
    for steps, rows, block in calls(seed, tokens):
        parts = [both.step(token[None]) for token in x[rows]] if steps else [both.prefill(x[rows], block)]
        for ours, theirs in parts:
            close(ours, theirs, OUTPUTS)
        both.same_state(**comparison)
