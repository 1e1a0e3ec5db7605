"""Record a run of transformers' DeepseekV4ForCausalLM, for `compare`. Stands alone: it needs nothing of Fathom.

    python record_transformers.py --model DIR --tokens ids.json --out recording.safetensors [--layers 0,17]

A recording is one safetensors file: `tokens` [t] int64, and tensors by site, `layers.{l}.{site}` or `{site}`, of a
prompt from position 0. This is the example for exporters of other runtimes: hook whatever your runtime has, give it the
name of its site, leave out what it does not have. Rows are tokens (entries, for `attention.entry` and
`indexer.key`); any float dtype will do.
"""

import argparse
import json
import sys

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

OTHER_FILES = 3  # exit status: files that hold other weights than the model
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Recorder:
    """Hooks on a model; `tensors` gives what they have seen in all calls, joined."""

    def __init__(self, model, layers=None):
        self.rows, self.latest, self.angles = {}, {}, None
        chosen = range(len(model.model.layers)) if layers is None else layers
        self.after(model.model.embed_tokens, "embedded", lambda out: out[0])
        for number in chosen:
            self.watch(model.model.layers[number], f"layers.{number}.")
        if layers is None:
            self.after(model.model.norm, "hidden", lambda out: out[0])
            self.after(model.lm_head, "logits", lambda out: out[0])

    def tensors(self):
        """Site -> tensor, in the dtype of the run."""
        return {name: joined(parts) for name, parts in self.rows.items()} | self.latest

    def note(self, name, rows):
        """Add the rows of one call."""
        self.rows.setdefault(name, []).append(rows.detach().clone().cpu())

    def after(self, module, name, part):
        """Note a part of what a module returns."""
        module.register_forward_hook(lambda _module, _given, out: self.note(name, part(out)))

    def before(self, module, name, part):
        """Note a part of what a module is given."""
        module.register_forward_pre_hook(lambda _module, given: self.note(name, part(given)))

    def watch(self, block, layer):
        """Note every site of a layer that a module shows."""
        self.after(block, f"{layer}streams", lambda out: out[0])
        for hyper, part in ((block.attn_hc, "attention"), (block.ffn_hc, "experts")):
            self.after(hyper, f"{layer}{part}.post", lambda out: out[0][0])
            self.after(hyper, f"{layer}{part}.comb", lambda out: out[1][0])
        self.before(block.ffn_hc, f"{layer}attention.streams", lambda given: given[0][0])
        self.after(block.input_layernorm, f"{layer}attention.input", lambda out: out[0])
        self.after(block.post_attention_layernorm, f"{layer}experts.input", lambda out: out[0])
        self.after(block.mlp.gate, f"{layer}experts.weights", lambda out: out[1])
        self.after(block.mlp.gate, f"{layer}experts.ids", lambda out: out[2])
        self.after(block.mlp.shared_experts.gate_proj, f"{layer}experts.shared_gate", lambda out: out[0])
        self.after(block.mlp.shared_experts.up_proj, f"{layer}experts.shared_up", lambda out: out[0])
        self.after(block.mlp, f"{layer}experts.output", lambda out: out[0])
        self.watch_attention(block.self_attn, layer)

    def watch_attention(self, attention, layer):
        """The same for the attention; queries and keys are noted as they are after their rotation."""
        heads = (attention.num_heads, attention.head_dim)

        def keep_angles(_module, _given, named):
            self.angles = named["position_embeddings"][attention.rope_layer_type]

        attention.register_forward_pre_hook(keep_angles, with_kwargs=True)
        self.after(attention.q_a_norm, f"{layer}attention.latent", lambda out: out[0])
        self.after(attention.q_b_norm, f"{layer}attention.query", lambda out: self.rotated(out)[0].transpose(0, 1))
        self.after(attention.kv_norm, f"{layer}attention.kv", lambda out: self.rotated(out[:, None])[0, 0])
        self.before(
            attention.o_a_proj,
            f"{layer}attention.unrotated",
            lambda given: given[0][0].flatten(1).unflatten(-1, heads),
        )
        self.after(attention, f"{layer}attention.output", lambda out: out[0][0])
        if attention.compressor is not None:  # returns all entries so far
            attention.compressor.register_forward_hook(
                lambda _module, _given, out: self.latest.update(
                    {f"{layer}attention.entry": out[0][0, 0].detach().clone()}
                )
            )
        if hasattr(attention.compressor, "indexer"):
            self.watch_indexer(attention.compressor.indexer, layer)

    def watch_indexer(self, indexer, layer):
        """The same for the indexer. It scales scores by one root and weights by the other, the site has both."""
        scale = indexer.head_dim**-0.5 * indexer.num_heads**-0.5
        self.before(indexer.scorer, f"{layer}indexer.query", lambda given: given[0][0])
        indexer.scorer.register_forward_pre_hook(
            lambda _module, given: self.latest.update({f"{layer}indexer.key": given[1][0].detach().clone()})
        )
        self.after(indexer.scorer.weights_proj, f"{layer}indexer.weights", lambda out: out[0].float() * scale)
        self.after(indexer, f"{layer}indexer.selected", lambda out: out[0])

    def rotated(self, x):
        """Apply the layer's rotation to [1, heads, t, d], as its next line does."""
        return apply_rotary_pos_emb(x, *self.angles)


def joined(parts):
    """Rows of all calls; selections get wider from call to call, with -1 where there is none."""
    if parts[0].ndim == 2 and len({part.shape[1] for part in parts}) > 1:
        width = max(part.shape[1] for part in parts)
        parts = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts]
    return torch.cat(parts).contiguous()


def record(model, tokens, calls, layers=None):
    """Run tokens [t] in calls of these lengths; with one call no cache is used."""
    recorder = Recorder(model, layers)
    cache, start = DynamicCache(config=model.config) if len(calls) > 1 else None, 0
    with torch.inference_mode():
        for length in calls:
            model(tokens[None, start : start + length], past_key_values=cache, use_cache=cache is not None)
            start += length
    return {"tokens": tokens, **recorder.tensors()}


def load(directory, dtype):
    """The model with eager attention, as a run of bf16 or fp32; the program ends where the files have other weights."""
    model, told = DeepseekV4ForCausalLM.from_pretrained(
        directory,
        dtype=DTYPES[dtype],
        attn_implementation="eager",
        local_files_only=True,
        ignore_mismatched_sizes=True,  # they are told, as what is missing is
        output_loading_info=True,
    )
    for what in ("missing", "unexpected", "mismatched"):  # with any of them it runs, and is another model
        if keys := sorted(str(key) for key in told[f"{what}_keys"]):
            print(f"{directory}: {len(keys)} {what} weights, first {keys[0]}", file=sys.stderr)
            sys.exit(OTHER_FILES)
    return model.eval().float() if dtype == "fp32" else model.eval()  # quantised weights are bf16 numbers either way


def main():
    """Run the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="checkpoint directory")
    p.add_argument("--tokens", required=True, help="JSON list of token ids")
    p.add_argument("--out", required=True, help="recording to write")
    p.add_argument("--layers", help="numbers between commas (default: all, and the head)")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the run (default bf16)")
    p.add_argument("--chunk", type=int, help="tokens of a call (default: all in one)")
    p.add_argument("--decode-from", type=int, help="the tokens from here on one at a time")
    args = p.parse_args()
    with open(args.tokens, encoding="utf-8") as file:
        tokens = torch.tensor(json.load(file))
    model = load(args.model, args.dtype)
    prefilled = len(tokens) if args.decode_from is None else args.decode_from
    chunk = args.chunk or prefilled
    calls = [min(chunk, prefilled - start) for start in range(0, prefilled, chunk)] + [1] * (len(tokens) - prefilled)
    layers = None if args.layers is None else [int(number) for number in args.layers.split(",")]
    save_file(record(model, tokens, calls, layers), args.out)


if __name__ == "__main__":
    main()
