"""transformers' `DeepseekV4ForCausalLM` as the other side of a comparison, on the weights of a checkpoint.

The library is imported when it is asked for and not before: this runtime does without it. Its modules are watched with
forward hooks, and what passes them is handed on under the names of `model.observe.sites`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.formats.reference import decode
from model.checkpoint.census import census
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.names import Kind, Meaning, Role, expert_name, parameters, translate
from model.checkpoint.weights import Weights, open_weights
from model.config import LayerKind, ModelConfig
from model.errors import CheckpointError
from model.observe import sites
from model.observe.sites import Site
from probes.parity.compare import Sink

LAYER_TYPES = {
    LayerKind.SWA: "sliding_attention",
    LayerKind.CSA: "compressed_sparse_attention",
    LayerKind.HCA: "heavily_compressed_attention",
}
SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "routed_scaling_factor",
    "rope_theta",
    "compress_rope_theta",
    "max_position_embeddings",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "num_hash_layers",
    "swiglu_limit",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "rms_norm_eps",
)
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
LARGEST = 8 << 30  # bytes of fp32 parameters that are decoded to build it

# Sites that none of its modules shows: mHC's reading weights are spent inside theirs, the attention before the inverse
# rotation is a local variable, and an index key or query that is not rounded is not there twice.
HIDDEN_INSIDE = (
    sites.ATTENTION_PRE,
    sites.EXPERTS_PRE,
    sites.MIXED,
    sites.INDEX_KEY_USED,
    sites.INDEX_QUERY_USED,
)


def unavailable(config: ModelConfig) -> str | None:
    """Why transformers cannot be the other side for this model here; None when it can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if config.n_shared_experts != 1:
        return f"transformers builds one shared expert, the model has {config.n_shared_experts}"
    ratios = {ratio for ratio, kind in zip(config.compress_ratios, config.layer_kinds, strict=True) if kind == "hca"}
    if len(ratios) > 1:
        return f"transformers has one ratio for all HCA layers, the model has {sorted(ratios)}"
    nbytes = sum(4 * prod(parameter.shape) for parameter in parameters(config).values())
    if nbytes > LARGEST:
        return f"the parameters take {nbytes / 2**30:.0f} GiB in fp32, more than {LARGEST >> 30}"
    return None


@cache
def build(directory: Path) -> Any:
    """Return a `DeepseekV4ForCausalLM` in fp32 on the CPU that holds the checkpoint's weights, decoded.

    CheckpointError unless each of its parameters was filled and each of the checkpoint's was used.
    """
    transformers = importlib.import_module("transformers")
    config = ModelConfig.from_file(directory / "config.json")
    model = transformers.DeepseekV4ForCausalLM(_their_config(transformers, config)).float().eval()
    checkpoint = Checkpoint.open(directory)
    weights = open_weights(checkpoint, census(checkpoint.shapes(), config, where=str(directory)))
    kinds = {name: parameter.kind for name, parameter in parameters(config).items()}
    for name, parameter in model.state_dict().items():
        values = _values(name, weights, kinds, config.n_routed_experts)
        if values.shape != parameter.shape:
            raise CheckpointError(f"transformers: {name} is {list(parameter.shape)}, the file's {list(values.shape)}")
        parameter.copy_(values)
    if unread := weights.unread():
        raise CheckpointError(f"transformers: {len(unread)} parameters have no place in its model, first {unread[0]}")
    return model


def _their_config(transformers: Any, config: ModelConfig) -> Any:
    """Return the same facts in transformers' config class."""
    yarn = config.rope_scaling
    kinds = zip(config.layer_kinds, config.compress_ratios, strict=True)
    rates = {LAYER_TYPES[kind]: ratio for kind, ratio in kinds if ratio}
    return transformers.DeepseekV4Config(
        **{name: getattr(config, name) for name in SAME_NAME},
        layer_types=[LAYER_TYPES[kind] for kind in config.layer_kinds],
        compress_rates={LAYER_TYPES[LayerKind.CSA]: 4, LAYER_TYPES[LayerKind.HCA]: 128} | rates,
        rope_parameters={} if yarn is None else {"rope_type": "yarn"} | {name: getattr(yarn, name) for name in YARN},
        num_nextn_predict_layers=0,
        attn_implementation="eager",
    )


def _values(theirs: str, weights: Weights, kinds: dict[str, Kind], experts: int) -> Tensor:
    """What one of transformers' parameters holds: float32, or int64 for a table."""
    meaning = translate(theirs)
    if meaning is None:
        raise CheckpointError(f"transformers: its parameter {theirs} is in no dialect")

    def stack(meaning: Meaning, *parts: str) -> Tensor:
        layer = meaning.parameter.split(".")[1]
        return torch.stack(
            [
                torch.cat([decode(weights.matrix(expert_name(layer, expert, part))) for part in parts])
                for expert in range(experts)
            ]
        )

    match meaning.role, kinds.get(meaning.parameter):
        case Role.STACKED_GATE_UP, _:
            return stack(meaning, "w1", "w3")
        case Role.STACKED_DOWN, _:
            return stack(meaning, "w2")
        case _, "matrix":
            return decode(weights.matrix(meaning.parameter))
        case _, "i64":
            return weights.table(meaning.parameter)
        case _:
            return weights.vector(meaning.parameter).float()


def run(directory: Path, tokens: list[int], sink: Sink) -> None:
    """Run the prompt in one uncached call and hand on what passes at every site but those of `HIDDEN_INSIDE`.

    Of what the sink returns, selections, experts and their weights are gone on with.
    """
    model = build(directory)
    hooks = _Hooks(sink)
    try:
        hooks.watch(model)
        with torch.inference_mode():
            model(torch.tensor(tokens)[None], use_cache=False)
    finally:
        hooks.remove()


class _Hooks:
    """Forward hooks on the modules of a model; theirs have a batch axis of one in front, ours do not."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.handles: list[Any] = []
        self.angles: tuple[Tensor, Tensor] | None = None  # of the layer that is running
        module = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
        self.rotate = module.apply_rotary_pos_emb

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def after(self, module: Any, layer: int | None, *shown: tuple[Site, Callable[[Any], Tensor]]) -> None:
        """Show parts of a module's output."""

        def hook(_module: Any, _given: Any, out: Any) -> None:
            for site, part in shown:
                self.sink(site, layer, part(out))

        self.handles.append(module.register_forward_hook(hook))

    def before(self, module: Any, layer: int, *shown: tuple[Site, Callable[[Any], Tensor]]) -> None:
        """Show parts of a module's positional arguments."""

        def hook(_module: Any, given: Any) -> None:
            for site, part in shown:
                self.sink(site, layer, part(given))

        self.handles.append(module.register_forward_pre_hook(hook))

    def watch(self, model: Any) -> None:
        def whole(out: Tensor) -> Tensor:
            return out[0]  # of a batch of one

        self.after(model.model.embed_tokens, None, (sites.EMBEDDED, whole))
        for layer, block in enumerate(model.model.layers):
            self.after(block.attn_hc, layer, (sites.ATTENTION_POST, _post), (sites.ATTENTION_COMB, _comb))
            self.after(block.input_layernorm, layer, (sites.ATTENTION_INPUT, whole))
            self._watch_attention(block.self_attn, layer)
            self.before(block.ffn_hc, layer, (sites.ATTENTION_STREAMS, lambda given: given[0][0]))
            self.after(block.ffn_hc, layer, (sites.EXPERTS_POST, _post), (sites.EXPERTS_COMB, _comb))
            self.after(block.post_attention_layernorm, layer, (sites.EXPERTS_INPUT, whole))
            self._watch_gate(block.mlp.gate, layer)
            self.after(block.mlp.shared_experts.gate_proj, layer, (sites.SHARED_GATE, whole))
            self.after(block.mlp.shared_experts.up_proj, layer, (sites.SHARED_UP, whole))
            self.after(block.mlp, layer, (sites.EXPERTS_OUTPUT, whole))
            self.after(block, layer, (sites.STREAMS, whole))
        self.after(model.model.norm, None, (sites.HIDDEN, whole))
        self.after(model.lm_head, None, (sites.LOGITS, whole))

    def _watch_gate(self, gate: Any, layer: int) -> None:
        def hook(_module: Any, _given: Any, out: Any) -> Any:
            logits, weights, ids = out  # without a batch axis
            new_ids = self.sink(sites.EXPERT_IDS, layer, ids)
            new_weights = self.sink(sites.EXPERT_WEIGHTS, layer, weights)
            return logits, weights if new_weights is None else new_weights, ids if new_ids is None else new_ids

        self.handles.append(gate.register_forward_hook(hook))

    def _watch_attention(self, attention: Any, layer: int) -> None:
        heads = (attention.num_heads, attention.head_dim)

        def keep_angles(_module: Any, _given: Any, named: Any) -> None:
            self.angles = named["position_embeddings"][attention.rope_layer_type]

        def rotated(x: Tensor) -> Tensor:  # [1, h, t, d] -> [t, h, d]
            assert self.angles is not None
            turned: Tensor = self.rotate(x, *self.angles)
            return turned[0].transpose(0, 1)

        self.handles.append(attention.register_forward_pre_hook(keep_angles, with_kwargs=True))
        self.after(attention.q_a_norm, layer, (sites.LATENT, lambda o: o[0]))
        self.after(attention.q_b_norm, layer, (sites.QUERY, rotated))
        self.after(attention.kv_norm, layer, (sites.KV, lambda o: rotated(o[:, None])[:, 0]))
        if attention.compressor is not None:
            self.after(attention.compressor, layer, (sites.ENTRY, lambda o: o[0][0, 0]))
        if attention.layer_type == LAYER_TYPES[LayerKind.CSA]:
            self._watch_indexer(attention.compressor.indexer, layer)
        self.before(
            attention.o_a_proj, layer, (sites.UNROTATED, lambda given: given[0][0].flatten(1).unflatten(-1, heads))
        )
        self.after(attention, layer, (sites.ATTENTION_OUTPUT, lambda o: o[0][0]))

    def _watch_indexer(self, indexer: Any, layer: int) -> None:
        # they scale the scores by one root and the weights by the other, we scale the weights by both
        scale = indexer.head_dim**-0.5 * indexer.num_heads**-0.5
        self.before(
            indexer.scorer,
            layer,
            (sites.INDEX_QUERY, lambda given: given[0][0]),
            (sites.INDEX_KEY, lambda given: given[1][0]),
        )
        self.after(indexer.scorer.weights_proj, layer, (sites.INDEX_WEIGHTS, lambda o: o[0] * scale))

        def hook(_module: Any, _given: Any, out: Tensor) -> Tensor:
            new = self.sink(sites.SELECTED, layer, out[0])
            return out if new is None else new[None]

        self.handles.append(indexer.register_forward_hook(hook))


def _post(out: Any) -> Tensor:
    """Of what their mHC returns: post, comb, collapsed."""
    post: Tensor = out[0][0]
    return post


def _comb(out: Any) -> Tensor:
    comb: Tensor = out[1][0]
    return comb
