"""What the mixture of experts holds, moment by moment: read off `model.moe` and `model.ranks.dispatch`."""

from collections.abc import Iterator

from runtime.plan.ops import F32, I64
from runtime.plan.sizes import Alive, Moment, Sizes, moment


def experts(s: Sizes, layer: int, alive: Alive) -> Iterator[Moment]:
    """`MoE.__call__`, beside what is `alive` around it."""
    c, m, D = s.config, s.m, s.config.hidden_size
    scores, k = m * c.n_routed_experts, c.num_experts_per_tok
    wide = 0 if s.item == F32 else m * D * F32
    routed = scores * (3 * F32 + I64)  # logits, scores, biased ones, and their order
    product = wide + s.wide_linear("ffn.gate", m, c.n_routed_experts, D)
    yield moment("gate", alive, work=max(product, routed))
    ids = m * k * I64 if c.is_hash(layer) else scores * I64  # ids by score are a view of the order of all experts
    alive = alive | {"expert ids and weights": ids + m * k * F32}
    if s.ranks == 1:
        yield from _alone(s, alive)
    elif s.tokens.split:
        yield from _all_to_all(s, alive)
    else:
        yield from _all_reduce(s, alive)
    alive = alive | {"sum over experts": m * D * F32}
    shared = _expert(s, "shared_experts", m, c.moe_intermediate_size * c.n_shared_experts)
    added = m * D * (s.item + 2 * F32) if s.item != F32 else 2 * m * D * F32
    yield moment("shared expert", alive, work=max(shared, added))


def _expert(s: Sizes, name: str, n: int, width: int) -> int:
    """`Expert.__call__`, of n tokens."""
    D, one = s.config.hidden_size, n * width * s.item
    up = one + s.linear(f"ffn.{name}.w1", n, width, D)
    active = 2 * one + s.costs.swiglu(n * width)
    down = 3 * one + s.linear(f"ffn.{name}.w2", n, D, width)
    return max(up, active, down)


def _tokens_of_one(s: Sizes) -> int:
    """Tokens that one expert gets: it gets none twice."""
    c = s.config
    return min(s.t, -(-s.t * c.num_experts_per_tok // c.n_routed_experts)) if s.even else s.t


def _run(s: Sizes) -> int:
    """An expert's tokens, gathered, and the expert, and its outputs widened."""
    c, n = s.config, _tokens_of_one(s)
    tokens = n * c.hidden_size * s.item
    widened = tokens + (0 if s.item == F32 else n * c.hidden_size * F32)
    return tokens + max(_expert(s, "experts", n, c.moe_intermediate_size), widened)


def _sorting(s: Sizes, pairs: int) -> int:
    """Pairs of token and expert in the experts' order, and what they are sorted with."""
    del s
    return 4 * pairs * I64


def _alone(s: Sizes, alive: Alive) -> Iterator[Moment]:
    pairs = s.m * s.config.num_experts_per_tok
    alive = alive | {"sum over experts": s.m * s.config.hidden_size * F32, "routing": _sorting(s, pairs)}
    yield moment("routed experts", alive, work=_run(s))


def _all_reduce(s: Sizes, alive: Alive) -> Iterator[Moment]:
    """Every rank has all tokens, fills in the outputs of its own experts, and gets those of all."""
    pairs, D = s.m * s.config.num_experts_per_tok, s.config.hidden_size
    outputs = pairs * D * s.item
    alive = alive | {"expert outputs": outputs, "routing": _sorting(s, pairs)}
    yield moment("routed experts", alive, work=_run(s))
    words = outputs + pairs * 4  # the same as integers, and by whom each row was filled
    yield moment("routed experts, all-reduce", alive, exchange=words + max(outputs, pairs * 8))
    yield moment("routed experts, summed", alive, exchange=outputs, work=_summed(s))


def _all_to_all(s: Sizes, alive: Alive) -> Iterator[Moment]:
    """Each rank sends its own tokens to the ranks of their experts, runs its experts for others', and sends back."""
    c, D, here = s.config, s.config.hidden_size, s.shares.experts.size
    k = c.num_experts_per_tok
    pairs = s.m * k
    taken = -(-s.t * k // s.ranks) if s.even else s.t * min(k, here)
    sent, received = pairs * D * s.item, taken * D * s.item
    alive = alive | {"routing": _sorting(s, pairs + taken), "tokens received": received}
    yield moment("routed experts, tokens sent", alive, exchange=sent)
    alive = alive | {"expert outputs": received}
    yield moment("routed experts", alive, work=_run(s))
    yield moment("routed experts, outputs back", alive, exchange=2 * sent, work=_summed(s))


def _summed(s: Sizes) -> int:
    """Sum in fp32, and of one slot the outputs, as they are and widened."""
    rows = s.m * s.config.hidden_size
    return rows * (F32 + s.item + (0 if s.item == F32 else F32))
