"""What a CoDA cache is set to, and where this project departs from the published package."""

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from fathom.model.errors import ConfigError

Pairing = Literal["interleaved", "half"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodaSettings:
    """Sizes, thresholds and rules of a CoDA cache. The defaults are the corrected rules; `published` has the others.

    Names in brackets are those of the package `coda-gqa-l`. ConfigError for values that contradict each other.

    Parameters
    ----------
    window, exact, summary
        Slots of the ring (window), of the exact bank (num_landmarks_exact) and of the summary bank
        (num_landmarks_summary). A bank of 0 slots is left out. Where a bank grows, the most it grows to.
    rope
        Which dims RoPE turns together: neighbours (2i, 2i + 1), or (i, i + D/2) as in the Llama family.
    exact_at_start, summary_at_start
        Slots in use from the start (min_landmarks_*); None: all of them, no growth.
    growth_horizon
        Tokens after which a bank may have grown to its full size (expansion_t_max); 0: at once.
    gate_exact, gate_summary
        Least gate with which a token enters a bank (write_gate_threshold_*).
    hit, novelty
        Mean cosine from which a token counts as one that the exact bank holds (exact_match_threshold), and below which
        as a new one (exact_novelty_threshold).
    refresh_on_hit
        A token that is a hit replaces what its slot holds (exact_refresh_on_hit).
    exact_candidates, summary_candidates
        Most tokens that one block offers to each bank (*_candidates_per_block); the rest of it is forgotten.
    overwrite_on_insert
        The first token of a summary slot replaces what the slot was initialised to (summary_overwrite_on_insert).
    memory_init
        Content of the slots before their first token (mem_init): 0, or normal with deviation 0.02. It is not attended
        to but it routes: an unused slot of the summary bank attracts tokens by its cosine, which for zeros is 0.
    mask_unused
        Only slots in use are attended to (mask_unused_memory).
    route
        What the summary bank compares: low-frequency dims of keys, as code and article do, or values, as the package's
        page says.
    candidate_order
        "gate": the highest gates, older token first among equals. "unsorted": what ``torch.topk(sorted=False)`` gives
        first, as the package does: with 64 candidates for the summary bank, the exact bank's 8 are any of these.
    lf_layout
        The dims taken for the low-frequency half of a key. "tail": [D/2, D), as the package does, which is right for
        interleaved RoPE only. "pairs": both dims of the slower half of the pairs, whichever they are.
    gate_eta_in_blocks
        A block moves a summary slot by what its tokens would move it one by one, ``1 - prod(1 - eta g_i)``, as a step
        does by ``eta g``. Otherwise by eta, whatever the gates and however many tokens.
    lru_touch_between
        A token between `novelty` and `hit` counts as a use of the slot it resembles.
    refresh_sums
        Several tokens of a block that overwrite one slot add up to ``sum(new) - (n - 1) old``; otherwise the last wins.
    published_growth
        In a block, slots that are not yet in use count as the oldest and are overwritten first, though no search finds
        them; and a bank grows only when a block brings more new tokens than the bank has slots.
    published_counts
        `exact_hits` counts tokens that their gate kept out (steps only), `exact_frustrated` no steps.
    inverse_norms
        Keep the inverse norm of each slot (fp32) instead of a normalised copy of what is compared, 11 % of the cache.

    """

    window: int
    exact: int
    summary: int
    rope: Pairing
    exact_at_start: int | None = None
    summary_at_start: int | None = None
    growth_horizon: int = 1_000_000
    gate_exact: float = 0.10
    gate_summary: float = 0.05
    hit: float = 0.90
    novelty: float = 0.70
    refresh_on_hit: bool = False
    exact_candidates: int = 8
    summary_candidates: int = 64
    overwrite_on_insert: bool = True
    memory_init: Literal["normal", "zeros"] = "normal"
    mask_unused: bool = True
    route: Literal["key", "value"] = "key"
    candidate_order: Literal["gate", "unsorted"] = "gate"
    lf_layout: Literal["pairs", "tail"] = "pairs"
    gate_eta_in_blocks: bool = True
    lru_touch_between: bool = False
    refresh_sums: bool = False
    published_growth: bool = False
    published_counts: bool = False
    inverse_norms: bool = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"coda: window {self.window}, want at least 1")
        for name in ("exact", "summary"):
            most, start = getattr(self, name), getattr(self, f"{name}_at_start")
            if most < 0 or getattr(self, f"{name}_candidates") < 0:
                raise ConfigError(f"coda: {name} {most}, {name}_candidates {getattr(self, f'{name}_candidates')}: < 0")
            # the package takes a start of 0, and then writes to a slot that is not in use
            if start is not None and not min(1, most) <= start <= most:
                raise ConfigError(f"coda: {name}_at_start {start}, want {min(1, most)} to {most}")
        if not -1 <= self.novelty <= self.hit <= 1:
            raise ConfigError(f"coda: novelty {self.novelty}, hit {self.hit}: want -1 <= novelty <= hit <= 1")

    @classmethod
    def published(cls, *, window: int, exact: int, summary: int, rope: Pairing) -> Self:
        """Return the rules of the package `coda-gqa-l` 1.3.1 on CPU, with its default thresholds.

        One departure: `candidate_order` stays "gate", because the package's own order is that of an unsorted top-k,
        which torch does not define.
        """
        return cls(
            window=window,
            exact=exact,
            summary=summary,
            rope=rope,
            lf_layout="tail",
            gate_eta_in_blocks=False,
            lru_touch_between=True,
            refresh_sums=True,
            published_growth=True,
            published_counts=True,
            inverse_norms=False,
        )

    @property
    def one_rule(self) -> bool:
        """Whether a block that evicts one token does to the banks what a step does."""
        published = self.published_growth or self.published_counts or not self.gate_eta_in_blocks
        return not published and self.exact_candidates > 0 and self.summary_candidates > 0

    def ceiling(self, start: int, size: int, position: int) -> int:
        """Slots that a bank which grows from `start` to `size` may use after so many tokens: by their logarithm."""
        horizon = self.growth_horizon
        ratio = min(1.0, math.log(1 + position) / math.log(1 + horizon)) if horizon > 0 else 1.0
        return start + int((size - start) * ratio)

    def low_frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        """Which dims of a key are its low-frequency half: [head_dim] bool.

        ConfigError where the width has no such half.
        """
        dims = torch.arange(head_dim, device=device)
        if self.lf_layout == "tail" or self.rope == "interleaved":
            low = dims >= head_dim // 2
        else:
            low = dims % (head_dim // 2) >= head_dim // 4
        if head_dim % (2 if self.lf_layout == "tail" else 4):
            raise ConfigError(f"coda: head_dim {head_dim} cannot be halved by pairs")
        return low
