"""Record a run of llama.cpp, for `compare`. Stands alone: it needs llama-cpp-python, numpy and safetensors, no more.

    python record_llama_cpp.py --model F.gguf --tokens ids.json --out recording.safetensors [--layers 0,17]

Written for llama-cpp-python 0.3.36 and run with it, on a CPU. llama.cpp calls back after each node of its graph that
was asked for; what is kept has the node's own name, which `compare` has a table of. A prompt may be cut into passes
(`--ubatch`) and end in decoded tokens (`--decode-from`): rows of all passes are joined. Index keys are kept once more,
as they are cached: after a Hadamard transform, in F16.
"""

import argparse
import ctypes
import json
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

CSA, HCA = 4, 128  # tokens of an entry
DTYPES = {0: np.float32, 1: np.float16, 26: np.int32, 30: np.uint16}  # of ggml; bf16 as its upper bytes of fp32
BF16 = 30
CACHES = {"f16": 1, "f32": 0}  # ggml's types


class Node(NamedTuple):
    """What is kept of the nodes of one name in a pass."""

    axes: int  # that it has: ggml says 4, those beyond are 1
    which: int | None = None  # of several nodes of the name, from 0 on; None: the last
    ratio: int = 1  # tokens of a row; behind the rows of entries come rows of nothing
    f16: bool = False  # kept with caches of F16 alone
    cast: bool = False  # to F16, as it is cached


# By the name that it is kept under; a layer's number stands for {l}.
IN_LAYERS = {
    "hc_pre-{l}#0": Node(2, 0), "hc_pre-{l}#1": Node(2, 1),
    "hc_post-{l}#0": Node(2, 0), "hc_post-{l}#1": Node(2, 1),
    "hc_comb-{l}#0": Node(3, 0), "hc_comb-{l}#1": Node(3, 1),
    "attn_norm-{l}": Node(2), "qr-{l}": Node(2), "qr_norm-{l}": Node(2), "q_norm-{l}": Node(3), "q-{l}": Node(3),
    "kv_norm-{l}": Node(3), "kv-{l}": Node(3),
    **{
        f"{name}_state_compress-{{l}}{number}": Node(3, which, ratio)
        for name, ratio in (("csa", CSA), ("lid", CSA), ("hca", HCA))
        for number, which in (("#2", 2), ("#3", 3), ("", None))
    },
    "lid_state_compress_rot-{l}": Node(3, None, CSA, f16=True, cast=True), "lid_q_rot-{l}": Node(3, f16=True),
    "lid_q-{l}#0": Node(3, 0), "lid_q_rope-{l}": Node(3), "lid_weights-{l}": Node(2), "lid_top_k-{l}": Node(2),
    "attn_raw-{l}": Node(2), "attn_csa_lid-{l}": Node(2), "attn_hca-{l}": Node(2), "attn_derope-{l}": Node(3),
    "attn_out-{l}": Node(2), "hc_attn_post-{l}": Node(3), "ffn_norm-{l}": Node(2),
    "ffn_moe_logits-{l}": Node(2), "ffn_moe_topk-{l}": Node(2), "ffn_moe_weights_scaled-{l}": Node(3),
    "ffn_moe_gate-{l}": Node(3), "ffn_moe_up-{l}": Node(3), "ffn_gate-{l}": Node(2), "ffn_up-{l}": Node(2),
    "ffn_out-{l}": Node(2), "l_last-{l}": Node(3), "l_out-{l}": Node(3),
}  # fmt: skip
EMBEDDED = {"embd": Node(2)}
HEAD = {"result_norm": Node(2), "result_output": Node(2)}
OLD_AND_NEW = {"l_last-{l}", "l_out-{l}"}  # one node, by what older and newer versions call it


class GgmlTensor(ctypes.Structure):
    """The head of a ggml_tensor, up to its strides: no function of ggml gives these."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


# --- rows, of which nothing here knows llama.cpp


def strided(data, kind, ne, nb):
    """Numbers of a tensor of ggml's type `kind`, axes outermost first; a copy.

    `data` is its bytes from its first number to its last, `ne` sizes and `nb` strides in bytes, innermost first.
    """
    x = np.ndarray(tuple(reversed(ne)), DTYPES[kind], data, strides=tuple(reversed(nb))).copy()
    return (x.astype(np.uint32) << 16).view(np.float32) if kind == BF16 else x


def with_axes(x, count):
    """Without axes of 1 in front, until it has so many."""
    while x.ndim > count and x.shape[0] == 1:
        x = x[0]
    return x


def joined(passes, sizes):
    """By kept name the rows of all passes.

    `passes` has for each pass {kept name: (node, array)}, `sizes` its tokens. Rows of entries that a pass did not
    finish are left out, and selections of all passes are as wide as the widest, with -1 where there is none.
    """
    parts, done = {}, 0
    for found, size in zip(passes, sizes, strict=True):
        for name, (node, array) in found.items():
            rows = (done + size) // node.ratio - done // node.ratio
            x = with_axes(array, node.axes)
            if len(x) < rows or (node.ratio == 1 and len(x) != rows):
                sys.exit(
                    f"{name}: {list(x.shape)} in a pass of {size} tokens from position {done} on, want {rows} rows"
                )
            parts.setdefault(name, []).append(x[:rows])
        done += size
    for several in parts.values():
        width = max(x.shape[-1] for x in several)
        for n, x in enumerate(several):
            if x.shape[-1] < width:
                several[n] = np.pad(x, ((0, 0), (0, width - x.shape[-1])), constant_values=-1)
    return {name: np.ascontiguousarray(np.concatenate(several)) for name, several in parts.items()}


class Kept:
    """What a graph has shown, pass by pass. A pass begins at the embedding's node."""

    def __init__(self, layers=None, cache="f16"):
        self.layers, self.cache, self.passes, self.sizes = layers, cache, [], []
        self.seen, self.at = Counter(), {}
        for kept, node in {**EMBEDDED, **IN_LAYERS, **(HEAD if layers is None else {})}.items():
            if cache == "f16" or not node.f16:
                self.at.setdefault(kept.partition("#")[0].partition("-")[0], {})[kept] = node

    def wanted(self, name):
        """The layer of a node that is asked for ("" where it has none); None of others."""
        stem, dash, layer = name.partition("-")
        if stem not in self.at or bool(dash) != any("{l}" in kept for kept in self.at[stem]):
            return None
        if not dash:
            return ""
        return layer if layer.isdigit() and (self.layers is None or int(layer) in self.layers) else None

    def note(self, name, read):
        """Keep a node, whose array `read` gives."""
        if (layer := self.wanted(name)) is None:
            return
        if name == "embd":
            self.passes.append({})
            self.sizes.append(None)
            self.seen.clear()
        number = self.seen[name]
        self.seen[name] += 1
        for kept, node in self.at[name.partition("-")[0]].items():
            if node.which in (None, number):
                x = read()
                x = x.astype(np.float16) if node.cast else x  # as ggml does: ties to even
                self.passes[-1][kept.replace("{l}", layer)] = node, x
        if name == "embd":
            self.sizes[-1] = len(with_axes(self.passes[-1]["embd"][1], 2))

    def never(self):
        """Names that were asked for and that no node of any layer had."""
        found = {kept.partition("-")[0] + kept.partition("#")[1] + kept.partition("#")[2] for one in self.passes
                 for kept in one}  # fmt: skip
        missing = [kept for some in self.at.values() for kept in some if kept.replace("-{l}", "") not in found]
        return missing if {*missing} >= OLD_AND_NEW else [kept for kept in missing if kept not in OLD_AND_NEW]


# --- llama.cpp


class Ggml:
    """What is asked of ggml about a tensor."""

    def __init__(self):
        from llama_cpp import _ctypes_extensions as extensions
        from llama_cpp._ggml import libggml_base_path

        self.base = extensions.load_shared_library("ggml-base", libggml_base_path)
        for name, given, back in (
            ("ggml_get_name", [ctypes.c_void_p], ctypes.c_char_p),
            ("ggml_nbytes", [ctypes.c_void_p], ctypes.c_size_t),
            ("ggml_nelements", [ctypes.c_void_p], ctypes.c_int64),
            ("ggml_backend_tensor_get", [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2, None),
        ):
            function = getattr(self.base, name)
            function.argtypes, function.restype = given, back

    def name(self, tensor):
        """Of a node."""
        return self.base.ggml_get_name(tensor).decode(errors="replace")

    def read(self, tensor):
        """The numbers of a node, wherever they are. The program ends where `GgmlTensor` is not how tensors are."""
        head, size = GgmlTensor.from_address(tensor), self.base.ggml_nbytes(tensor)
        ne, nb = list(head.ne), list(head.nb)
        if head.type not in DTYPES:
            sys.exit(f"{self.name(tensor)}: ggml's type {head.type} is none of {list(DTYPES)}")
        item = np.dtype(DTYPES[head.type]).itemsize
        spans = item + sum((n - 1) * b for n, b in zip(ne, nb, strict=True))
        if int(np.prod(ne)) != self.base.ggml_nelements(tensor) or spans != size:
            sys.exit("this version of ggml lays a ggml_tensor out otherwise: see GgmlTensor")
        data = ctypes.create_string_buffer(size)
        self.base.ggml_backend_tensor_get(tensor, data, 0, size)
        return strided(data, head.type, ne, nb)


def record(path, ids, lengths, kept, ubatch=None, flash=None, threads=1):
    """Run ids in calls of these lengths; `kept` is filled. The program ends where llama.cpp fails.

    llama.cpp cuts a call into passes of `ubatch` tokens; None: into one. `flash`: whether attention is fused; None: as
    llama.cpp chooses.
    """
    import llama_cpp as lib

    ggml, stopped = Ggml(), []

    @lib.ggml_backend_sched_eval_callback
    def see(tensor, ask, _data):
        name = ggml.name(tensor)
        if ask:
            return kept.wanted(name) is not None
        try:
            kept.note(name, lambda: ggml.read(tensor))
        except (SystemExit, KeyboardInterrupt, ValueError, LookupError, TypeError, MemoryError) as error:
            stopped.append(error)  # ctypes would print it and go on
        return not stopped

    lib.llama_backend_init()
    model = loaded(lib, path)
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = len(ids), max(lengths), ubatch or max(lengths)
    params.n_threads = params.n_threads_batch = threads
    params.no_perf, params.cb_eval = True, see
    params.type_k = params.type_v = CACHES[kept.cache]
    if flash is not None:
        params.flash_attn_type = int(flash)
    context = lib.llama_init_from_model(model, params)
    if not context:
        sys.exit(f"{path}: llama.cpp makes no context, and says why above")
    batch, start = lib.llama_batch_init(max(lengths), 0, 1), 0
    for length in lengths:
        fill(batch, ids[start : start + length], start)
        status = lib.llama_decode(context, batch)
        if stopped:
            raise stopped[0]
        if status:
            sys.exit(f"llama_decode returned {status} at position {start}")
        start += length
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)


def loaded(lib, path):
    """The model, on the CPU."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        sys.exit(f"{path}: llama.cpp does not load it, and says why above")
    return model


def fill(batch, ids, start):
    """Put ids into a batch, as one sequence from position `start` on, with logits of each."""
    batch.n_tokens = len(ids)
    for n, one in enumerate(ids):
        batch.token[n], batch.pos[n], batch.n_seq_id[n] = one, start + n, 1
        batch.seq_id[n][0], batch.logits[n] = 0, 1


def parser():
    """Return the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="GGUF file")
    p.add_argument("--tokens", required=True, help="JSON list of token ids")
    p.add_argument("--out", required=True, help="recording to write")
    p.add_argument("--layers", help="numbers between commas (default: all, and the head)")
    p.add_argument("--ubatch", type=int, help="tokens of a pass (default: all in one)")
    p.add_argument("--decode-from", type=int, help="the tokens from here on one at a time")
    p.add_argument("--cache", choices=tuple(CACHES), default="f16", help="numbers of the caches (default f16)")
    p.add_argument("--flash", choices=("off", "on"), help="fused attention (default: as llama.cpp chooses)")
    p.add_argument("--threads", type=int, default=1, help="of llama.cpp (default 1)")
    return p


def main():
    """Run the command line."""
    args = parser().parse_args()
    with open(args.tokens, encoding="utf-8") as file:
        ids = json.load(file)
    layers = None if args.layers is None else {int(number) for number in args.layers.split(",")}
    kept = Kept(layers, args.cache)
    flash = None if args.flash is None else args.flash == "on"
    prefilled = len(ids) if args.decode_from is None else args.decode_from
    lengths = [prefilled] + [1] * (len(ids) - prefilled)
    record(args.model, ids, lengths, kept, args.ubatch, flash, args.threads)
    if sum(kept.sizes) != len(ids):
        sys.exit(f"passes of {kept.sizes} tokens were seen, of {len(ids)}")
    tensors = joined(kept.passes, kept.sizes)
    save_file({"tokens": np.array(ids, np.int64), **tensors}, args.out)
    print(f"recorded {len(tensors)} nodes of {len(ids)} tokens in {len(kept.sizes)} passes")
    if missing := kept.never():
        print(f"asked for, and no node had the name: {', '.join(missing)}")


if __name__ == "__main__":
    main()
