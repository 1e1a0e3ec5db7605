"""One layer's routing and experts against float64: the comparisons of the routing probe."""

from dataclasses import dataclass

import numpy as np

from probes.finding import Finding, at_most, exactly, judged, vacuous
from probes.shared.moe import I64, Experts, Scores, distances
from probes.shared.narrow import F64

TELLING = 10.0  # a fault must move what is judged by so many times its bound, or the run could not have shown it


@dataclass(frozen=True)
class Captured:
    """What one layer's experts were given and returned, for t tokens."""

    x: F64  # [t, hidden]
    ids: I64  # [t, k]
    weights: F64  # [t, k]
    output: F64  # [t, hidden]


@dataclass(frozen=True)
class Routed:
    """What the comparison of one layer gave."""

    layer: int
    hashed: bool
    chosen: int  # experts of a token
    load: I64  # [experts], tokens that went to each
    wrong: list[int]  # tokens that went elsewhere than they should, near ties left out
    near_ties: int  # tokens whose last and next expert fp32 cannot tell apart
    would_differ: int  # tokens that would go elsewhere without the bias, or without the table
    weight_error: float  # largest, as a share of what fp32 rounding explains
    weight_error_biased: float  # the same, of a runtime with the bias in the weights
    sum_error: float  # largest distance of the weights' sum from the route scale, as a share of it
    mixture: F64  # [rows], distance of the output from float64, as a share of it
    equal: float  # share of the output's values that are the oracle's bit for bit
    shared_twice: float  # the median distance that the shared expert, counted twice, would have


def compare(seen: Captured, layer: int, tokens: list[int], oracle: Experts, rows: int) -> Routed:
    """Hold one layer against the files; `rows` tokens, spread over the prompt, for the experts' outputs."""
    config = oracle.config
    hashed, k, scale = config.is_hash(layer), config.num_experts_per_tok, config.routed_scaling_factor
    scores = Scores.of(seen.x, oracle.weights, layer, hashed=hashed)
    found, (best, near) = np.sort(seen.ids, axis=1), scores.choice(k)
    if hashed:
        table = oracle.weights.table(f"layers.{layer}.ffn.gate.tid2eid").numpy()
        wanted, otherwise, near = np.sort(table[tokens], axis=1), best, np.zeros(len(tokens), bool)
    else:
        wanted, otherwise = best, Scores(scores.score, 0 * scores.bias, scores.error).choice(k)[0]
    wrong = (found != wanted).any(1) & ~near
    right = scores.weights(seen.ids, scale)
    rounding = scores.weight_error(seen.ids) * right
    biased = scores.weights(seen.ids, scale, biased=True)
    some = np.unique(np.linspace(0, len(tokens) - 1, rows).astype(int))
    routed, shared = oracle.mixture(seen.x[some], layer, seen.ids[some], seen.weights[some])
    whole = oracle.kept(routed + shared)
    return Routed(
        layer,
        hashed,
        k,
        np.bincount(seen.ids.ravel(), minlength=config.n_routed_experts),
        np.flatnonzero(wrong).tolist(),
        int(near.sum()),
        int((wanted != otherwise).any(1).sum()),
        float((np.abs(seen.weights - right) / rounding).max()),
        float((np.abs(biased - right) / rounding).max()),
        float(np.abs(seen.weights.sum(1) / scale - 1).max()),
        distances(seen.output[some], whole),
        float((seen.output[some] == whole).mean()),
        float(np.median(distances(whole + shared, whole))),
    )


def findings(layers: list[Routed], close: float) -> list[Finding]:
    """Judge the layers; `close` bounds the distance of the experts' outputs."""
    found: list[Finding] = []
    for one in layers:
        choice = (
            "experts that the table does not name" if one.hashed else "experts that are not the top of score + bias"
        )
        found += [
            judged(f"{choice}, tokens", len(one.wrong), exactly(0), layer=one.layer, positions=one.wrong[:5]),
            judged(
                "weights against unbiased scores, as a share of what fp32 rounding explains",
                one.weight_error,
                at_most(1),
                layer=one.layer,
            ),
            judged(
                f"tokens whose sum over experts and one shared expert is further than {close:.2g} from float64",
                int((one.mixture > close).sum()),
                # a value on the border of two E4M3 codes may move a token further; such tokens are less than 1 %
                at_most(max(1, len(one.mixture) // 50)),
                layer=one.layer,
                of=len(one.mixture),
                largest_distance=float(one.mixture.max()),
                values_equal=one.equal,
                shared_expert_twice_would_give=one.shared_twice,
            ),
        ]
    return found + _untelling(layers, close)


def _untelling(layers: list[Routed], close: float) -> list[Finding]:
    """What this prompt could not have shown, because right and wrong would have looked alike."""
    found = []
    hashed, scored = [one for one in layers if one.hashed], [one for one in layers if not one.hashed]
    if hashed and not any(one.would_differ for one in hashed):
        found.append(vacuous("choice by table", "the scores name the same experts for every token"))
    if scored and not any(one.would_differ for one in scored):
        found.append(vacuous("choice by score + bias", "the bias changes the experts of no token"))
    # the weight of a token's one expert is the whole scale, whatever the bias
    if scored and scored[0].chosen > 1 and max(one.weight_error_biased for one in scored) < TELLING:
        found.append(vacuous("weights against unbiased scores", "the biases are as small as fp32 rounding"))
    if any(one.shared_twice < TELLING * close for one in layers):
        found.append(vacuous("sum over experts", "in some layer the shared expert adds next to nothing"))
    return found
