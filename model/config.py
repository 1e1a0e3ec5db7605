"""The architecture as config.json states it: frozen facts, no defaults, nothing guessed.

Two dialects are read: DeepSeek's own (`compress_ratios`, `num_hash_layers`, `rope_scaling`) and the one
that transformers saves (`layer_types`, `mlp_layer_types`, `compress_rates`, `rope_parameters`). DeepSeek-V4.1's file
is read too. Refused, by name: every other model_type, a missing architecture field, a field this project does not know,
and values it does not implement.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from fathom.kernels.formats.groups import INDEX_GROUP, KV_GROUP, LINEAR_GROUP
from fathom.model.checkpoint.config_fields import V41, Dspark, LayerKind, Yarn
from fathom.model.checkpoint.config_json import fields, read_json
from fathom.model.choices import NUMERICS, PLAIN
from fathom.model.errors import ConfigError
from fathom.model.rounding import ALL_FP8, F16, FP4, FP8, RECORD, TWICE, Rounding

__all__ = ["V41", "Dspark", "LayerKind", "ModelConfig", "Yarn", "check_widths"]

# A file of a few KiB describes every published model; these bounds only keep a hostile one from
# turning into gigabytes of names.
MAX_LAYERS = 4096
MAX_EXPERTS_IN_ALL = 1_000_000
# No tensor's shape shows these two, so nothing else would stop them: the window's rings are allocated before the first
# token, and each token makes the iterations twice in each layer. Published: 128 and 20.
MAX_WINDOW = 1 << 16
MAX_SINKHORN_ITERS = 1000
V41_BLOCK = 32
MAX_DRAFTS = 64  # slots of a pass of DSpark; published: 5

# What the weights and the arithmetic do not depend on.
NOT_ARCHITECTURE = ("max_position_embeddings", "bos_token_id", "eos_token_id", "num_mtp_layers", "dspark")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One V4-style architecture, with the field names of DeepSeek's config.json.

    Raises
    ------
    ConfigError
        From the constructor too, when two fields contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int  # the LAST dims of a head
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # [num_hidden_layers], 0 = no compressor; mtp stages are not listed
    layer_kinds: tuple[LayerKind, ...]  # [num_hidden_layers]
    rope_theta: float  # base of SWA layers
    compress_rope_theta: float  # base of CSA and HCA layers
    rope_scaling: Yarn | None
    rms_norm_eps: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    num_mtp_layers: int  # stages of a draft head that the file announces
    dspark: Dspark | None  # what they are, where it is DSpark's
    v41: V41 | None  # None: the model is a V4

    def __post_init__(self) -> None:
        for wrong, message in self._contradictions():
            if wrong:
                raise ConfigError(message)

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        layers, rope = self.num_hidden_layers, self.qk_rope_head_dim
        experts, chosen = self.n_routed_experts, self.num_experts_per_tok
        window, context = self.sliding_window, self.max_position_embeddings
        return (
            (layers > MAX_LAYERS, f"num_hidden_layers is {layers}, more than {MAX_LAYERS}"),
            (layers * experts > MAX_EXPERTS_IN_ALL, f"n_routed_experts is {experts} in each of {layers} layers"),
            (len(self.compress_ratios) != layers, f"{len(self.compress_ratios)} compress ratios for {layers} layers"),
            (len(self.layer_kinds) != layers, f"{len(self.layer_kinds)} layer kinds for {layers} layers"),
            (self.num_hash_layers > layers, f"num_hash_layers is {self.num_hash_layers}, more than {layers} layers"),
            # RoPE's frequencies are powers of 1/theta, and YaRN divides by its logarithm
            (self.rope_theta <= 1, f"rope_theta is {self.rope_theta:g}, want more than 1"),
            (self.compress_rope_theta <= 1, f"compress_rope_theta is {self.compress_rope_theta:g}, want more than 1"),
            (window > context, f"sliding_window is {window}, more than max_position_embeddings {context}"),
            (window > MAX_WINDOW, f"sliding_window is {window}, more than {MAX_WINDOW}"),
            (
                self.hc_sinkhorn_iters > MAX_SINKHORN_ITERS,
                f"hc_sinkhorn_iters is {self.hc_sinkhorn_iters}, more than {MAX_SINKHORN_ITERS}",
            ),
            (rope % 2 != 0, f"qk_rope_head_dim is {rope}, want an even number: RoPE rotates pairs"),
            (rope > self.head_dim, f"qk_rope_head_dim is {rope}, more than head_dim {self.head_dim}"),
            (rope > self.index_head_dim, f"qk_rope_head_dim is {rope}, more than index_head_dim {self.index_head_dim}"),
            (
                self.num_attention_heads % self.o_groups != 0,
                f"num_attention_heads is {self.num_attention_heads}, not a multiple of o_groups {self.o_groups}",
            ),
            (chosen > experts, f"num_experts_per_tok is {chosen}, more than n_routed_experts {experts}"),
            (self.bos_token_id >= self.vocab_size, f"bos_token_id is {self.bos_token_id}, outside the vocabulary"),
            (self.eos_token_id >= self.vocab_size, f"eos_token_id is {self.eos_token_id}, outside the vocabulary"),
            *(self._contradictions_of_v41(self.v41) if self.v41 is not None else ()),
        )

    def _contradictions_of_v41(self, own: V41) -> Iterator[tuple[bool, str]]:
        """Sources that are no sources: of whose entries, keys and selections later layers would find none."""
        far = {layer for layer, ratio in enumerate(self.compress_ratios) if ratio}
        for name, sources in (("kv_source_layer_ids", own.kv_sources), ("index_source_layer_ids", own.index_sources)):
            yield not {*sources} <= far, f"{name} is {list(sources)}, want layers with a compress ratio"
            yield sorted({*sources}) != [*sources], f"{name} is {list(sources)}, want it ascending"
            first = min(far, default=None)
            yield first is not None and first not in sources, f"{name} is {list(sources)}, without layer {first}"
        yield not {*own.kv_sources} <= {*own.index_sources}, "kv_source_layer_ids: want each in index_source_layer_ids"
        last = own.candidate_source
        yield last not in own.kv_sources[-1:], f"candidate_source_layer_id is {last}, want the last KV source"
        early = [layer for layer in own.index_sources if layer < last and layer not in own.kv_sources]
        yield bool(early), f"index_source_layer_ids: {early} lie before candidate_source_layer_id and hold no KV"
        for layer in far:
            source = max((at for at in own.kv_sources if at <= layer), default=layer)
            unlike = self.compress_ratios[source] != self.compress_ratios[layer]
            yield unlike, f"compress_ratios: layer {layer} reads entries of layer {source}, whose ratio is another"
        vision, drafts = own.vision.num_hidden_layers, self.num_mtp_layers * own.draft_experts
        yield vision > MAX_LAYERS, f"vision_config.num_hidden_layers is {vision}, more than {MAX_LAYERS}"
        yield drafts > MAX_EXPERTS_IN_ALL, f"dspark_n_routed_experts is {own.draft_experts} in each stage"
        yield own.image_token_id >= self.vocab_size, "image_token_id: outside the vocabulary"
        tables = own.engram
        yield sorted({*tables.layer_ids}) != [*tables.layer_ids], "engram_layer_ids: want them ascending"
        yield len(tables.layer_ids) != len(tables.rows), "engram_layer_ids and engram_num_embeddings differ in length"
        yield any(at >= self.num_hidden_layers for at in tables.layer_ids), "engram_layer_ids: beyond the last layer"
        yield tables.pad_token_id >= self.vocab_size, "engram_pad_token_id: outside the vocabulary"
        yield tables.max_ngram < 2, "engram_max_ngram_size: want 2 or more"
        yield own.draft_experts_per_tok > own.draft_experts, "dspark_num_experts_per_tok: more than there are"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: EOS, and in V4.1 what stands for an image, which no text goes on behind."""
        return (self.eos_token_id, *self.of_images)

    @property
    def of_images(self) -> tuple[int, ...]:
        """Ids that stand for parts of images, which no run takes."""
        return () if self.v41 is None else (self.v41.image_token_id,)

    @property
    def draft_taps(self) -> tuple[int, ...]:
        """Layers behind which DSpark reads the streams: those that are named, in V4.1 those before these."""
        assert self.dspark is not None, "of its config"
        targets = self.dspark.target_layer_ids
        return targets if self.v41 is None else tuple(layer - 1 for layer in targets)

    def layer_kind(self, layer: int) -> LayerKind:
        """SWA, CSA or HCA; layers behind the last one are stages of a draft head, all of them SWA."""
        return self.layer_kinds[layer] if layer < self.num_hidden_layers else LayerKind.SWA

    def ratio(self, layer: int) -> int:
        """Tokens for each compressed entry; 0 in an SWA layer."""
        return self.compress_ratios[layer] if layer < self.num_hidden_layers else 0

    def is_hash(self, layer: int) -> bool:
        """Whether the layer's experts are looked up by token id (`tid2eid`) instead of chosen by score."""
        return layer < self.num_hash_layers

    def entry_source(self, layer: int) -> int:
        """The layer that makes the compressed entries that this one reads: itself, but in V4.1."""
        return layer if self.v41 is None else max(at for at in self.v41.kv_sources if at <= layer)

    def selection_source(self, layer: int) -> int:
        """The layer that selects the entries that this one reads: itself, but in V4.1."""
        return layer if self.v41 is None else max(at for at in self.v41.index_sources if at <= layer)

    def makes_entries(self, layer: int) -> bool:
        """Whether a layer has a compressor."""
        return bool(self.ratio(layer)) and self.entry_source(layer) == layer

    def selects(self, layer: int) -> bool:
        """Whether a layer has an indexer."""
        return self.layer_kind(layer) is LayerKind.CSA and self.selection_source(layer) == layer

    def experts(self, layer: int) -> tuple[int, int]:
        """Routed experts of a layer, or of a stage of a draft head, and how many a token takes."""
        if self.v41 is not None and layer >= self.num_hidden_layers:
            return self.v41.draft_experts, self.v41.draft_experts_per_tok
        return self.n_routed_experts, self.num_experts_per_tok

    @property
    def fp8_block(self) -> int:
        """Rows and columns of an FP8 matrix that share a scale, and columns of the input of a linear that do."""
        return LINEAR_GROUP if self.v41 is None else V41_BLOCK

    def prefix(self, layer: int) -> str:
        """What names of a layer's parameters begin with; stage 0 of a draft head is the layer behind the last."""
        behind = layer - self.num_hidden_layers
        return f"layers.{layer}" if behind < 0 else f"mtp.{behind}"

    def to_json(self) -> dict[str, Any]:
        """Every field as JSON values, in the order of the class; both dialects give the same."""
        drafts = self.dspark
        fields = asdict(self)
        if self.v41 is None:  # fingerprints of V4 are of the fields that it has
            del fields["v41"]
        return fields | {
            "compress_ratios": list(self.compress_ratios),
            "layer_kinds": [kind.value for kind in self.layer_kinds],
            "dspark": drafts and asdict(drafts) | {"target_layer_ids": list(drafts.target_layer_ids)},
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the fields that weights and arithmetic depend on, as hex digits."""
        fields = {name: value for name, value in self.to_json().items() if name not in NOT_ARCHITECTURE}
        return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a config.json.

        Parameters
        ----------
        path : Path
            The file itself, not its folder.

        Raises
        ------
        ConfigError
            With one line naming the file and the field at fault.
        """
        return cls.from_json(read_json(path), str(path))

    @classmethod
    def from_json(cls, obj: Mapping[str, Any], where: str) -> Self:
        """Check and translate the parsed config.json of either dialect.

        Parameters
        ----------
        obj : Mapping
            The parsed file.
        where : str
            What messages call it, usually its path.

        Raises
        ------
        ConfigError
            With one line naming `where` and the field at fault.
        """
        try:
            return cls(**fields(obj))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def check_widths(config: ModelConfig, rounding: Rounding) -> None:
    """Refuse to round widths that the groups of a format do not divide: ConfigError naming the field.

    A partial group has no defined scale in the reference, so there is nothing to be faithful to.
    """
    block, nope = config.fp8_block, config.head_dim - config.qk_rope_head_dim
    per_linear = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    wrong = [
        f"{name} is {width}, no multiple of {block}"
        for name, width in per_linear.items()
        if rounding.linears == FP8 and width % block
    ]
    if rounding.kv in (FP8, ALL_FP8) and config.v41 is not None and config.head_dim % block:
        wrong.append(f"head_dim is {config.head_dim}, no multiple of {block}")
    if F16 in (rounding.kv, rounding.index) and config.v41 is not None:
        wrong.append("f16 is what llama.cpp keeps of V4")
    if rounding.kv in (RECORD, TWICE, ALL_FP8) and config.v41 is None:
        wrong.append(f"kv={rounding.kv} is of V4.1")
    elif rounding.kv in ((FP8,) if config.v41 is None else (RECORD, TWICE)) and nope % KV_GROUP:
        wrong.append(f"head_dim - qk_rope_head_dim is {nope}, no multiple of {KV_GROUP}")
    width = config.index_head_dim
    of_blocks = {FP4: INDEX_GROUP, F16: 1}.get(rounding.index, 0)
    rotated = config.v41 is None  # by Hadamard's matrix, whose sizes are powers of two
    unfit = of_blocks and (width % of_blocks or (rotated and width & (width - 1)))
    if unfit and LayerKind.CSA in config.layer_kinds:
        wrong.append(f"index_head_dim is {width}, no power of two that {of_blocks} divides")
    if wrong:
        flag = "--numerics" if rounding.numerics in NUMERICS else "--rounding"
        raise ConfigError(f"{flag} {rounding.numerics}: {'; '.join(wrong)}; run this model with --numerics {PLAIN}")
