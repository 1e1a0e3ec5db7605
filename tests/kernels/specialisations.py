"""How often each kernel is compiled for calls that differ in position, context and number of tokens; nothing is.

`python tests/kernels/specialisations.py`: ops of V4-Flash are called on uninitialised tensors at positions up to 1M, as
an eager decode calls them, and as prefill does with calls of every size. A launch computes the key under which Triton
keeps what it compiles (constants, dtypes, divisibility), for a driver that only names a GPU, and ends there.

One JSON object: of each part, kernel to its number of keys. It must run without TRITON_INTERPRET, so in a process of
its own.
"""

import json
from collections import defaultdict
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from fathom.kernels.attention.triton import attend
from fathom.kernels.compress.triton import compress_at_once, pool, store
from fathom.kernels.exchange.triton import push
from fathom.kernels.experts.triton import sum_slots
from fathom.kernels.experts.triton_expert_codes import experts, experts_down, experts_fp8, experts_up
from fathom.kernels.formats import rows
from fathom.kernels.formats.stored import Fp4, Fp8, TokenRing
from fathom.kernels.hyper.triton import read_streams
from fathom.kernels.indexer.triton import select
from fathom.kernels.linear.reference import FEW, Product
from fathom.kernels.linear.triton import linear
from fathom.kernels.linear.triton_codes import linears_fp8
from fathom.kernels.quantise.triton import hadamard, pack_fp8, rotate, simulate_fp8, unpack_fp8
from fathom.scripts.bench.gpu import NoDevice

CPU, BF16 = torch.device("cpu"), torch.bfloat16
D, WINDOW, HEADS, K, CHUNK, HIDDEN, INNER = 512, 128, 64, 512, 512, 4096, 2048
# before the first entry, at each remainder of 4, 16 and 128, where widths and tiles grow, and far out
FAR = (512, 2048, 4096, 16384, 65536, 262144, 600000)
POSITIONS = [*range(70), *range(120, 140), *(n + d for n in FAR for d in (-4, -1, 0, 7)), (1 << 20) - 1]
SIZES = [*range(1, 40), 48, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 300, 384, 500, 511, 512]

keys: dict[str, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))  # by part and kernel
parts = [""]  # the last is that of the launches that follow


def note(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compute the key of a launch as `JITFunction.run` does, and launch nothing."""
    del grid, warmup
    options |= {"debug": False, "instrumentation_mode": "", "fpsan_homomorphic_casts": False}
    _, key_cache, _, _, binder = self.device_caches[driver.active.get_current_device()]
    _, specialisation, found = binder(*given, **options)
    keys[parts[-1]][self.__name__].add(compute_cache_key(key_cache, specialisation, found))


def narrow(*shape):
    return torch.empty(shape, dtype=BF16)


E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
RING, SINK = narrow(WINDOW + CHUNK - 1, D), torch.empty(HEADS)
ENTRIES = {"bf16": torch.empty(1 << 18, D, dtype=BF16), "fp8": rows.fp8_entries(1 << 18, D, 64, CPU)}
INDEX_KEYS = {"bf16": torch.empty(1 << 18, 128, dtype=BF16), "fp4": rows.fp4_keys(1 << 18, 128, CPU)}
MATRIX = Fp8(torch.empty(1024, HIDDEN, dtype=E4M3), torch.empty(8, HIDDEN // 128, dtype=E8M0))
HELD = 8  # experts of a rank


def fp4(out, columns):
    data = torch.empty(HELD, out, columns // 2, dtype=torch.int8)
    return Fp4(data, torch.empty(HELD, out, columns // 32, dtype=E8M0))


W1, W2 = fp4(INNER, HIDDEN), fp4(HIDDEN, INNER)


def attention(position, t):
    """SWA, CSA and HCA as an eager call has them: rows that are written, and a selection as wide as there are."""
    q = narrow(t, HEADS, D)
    parts.append("SWA")
    attend(q, RING, position, WINDOW, None, 0, None, SINK)
    for form, entries in ENTRIES.items():
        parts.append(f"CSA {form}")
        written = rows.first(entries, (position + t) // 4)
        selected = torch.empty(t, min(K, (position + t) // 4), dtype=torch.int32)
        attend(q, RING, position, WINDOW, written, 4, selected, SINK)
        parts.append(f"HCA {form}")
        attend(q, RING, position, WINDOW, rows.first(entries, (position + t) // 128), 128, None, SINK)
    for form, index_keys in INDEX_KEYS.items():
        parts.append(f"indexer {form}")
        select(narrow(t, 64, 128), torch.empty(t, 64), rows.first(index_keys, (position + t) // 4), position, 4, K)


def compressors(position, t):
    for ratio, series, width, rounding, cache in (
        (4, 2, D, "kv", ENTRIES["fp8"]), (128, 1, D, "none", ENTRIES["bf16"]), (4, 2, 128, "index", INDEX_KEYS["fp4"]),
    ):  # fmt: skip
        parts.append(f"compress {ratio} {width}")
        new, own = torch.empty(t, series * width), torch.empty(series * ratio, series * width)
        ring, norm = TokenRing(own, own), torch.empty(width)
        compress_at_once(new, new, ring, position, ratio, norm, 1e-6, torch.empty(32), rounding, cache, BF16)
        if closed := t // ratio:  # as an eager call of several tokens has them
            windows = new[: closed * ratio].unflatten(0, (closed, ratio))
            before = (windows[..., :width],) * 2 if series == 2 else (None, None)
            pool(windows[..., -width:], windows[..., -width:], *before)
            store(cache, position // ratio, narrow(closed, width))


def products(t):
    """What does not depend on a position."""
    x, ids, weights = narrow(t, HIDDEN), torch.empty(t, 6, dtype=torch.int64), torch.empty(t, 6)
    parts.append("linear")
    linear(x, MATRIX)
    if t > FEW:
        parts.append("linears of codes")
        linears_fp8(x, [Product(MATRIX)], deployed=True)
    parts.append("experts")
    experts(x, ids, weights, W1, W1, W2, 10.0, deployed=True)
    parts.append("experts of a rank")
    experts_down(experts_up(x, ids, weights, W1, W1, 10.0, deployed=True), ids, W2, deployed=True)
    parts.append("experts of codes")
    experts_fp8(x, ids, weights, W1, W1, W2, 10.0, deployed=True)
    parts.append("whole experts of a rank")
    y = experts(x, ids, weights, W1, W1, W2, 10.0, deployed=True, summed=False)
    sum_slots(y, ids)
    parts.append("what ranks exchange")
    packed = pack_fp8(x, 128)
    push(packed, torch.empty(t, 8, dtype=torch.int32), torch.empty(8, dtype=torch.int64))
    unpack_fp8(packed, 128, BF16)
    parts.append("activations")
    simulate_fp8(x, 128)
    parts.append("index queries")
    hadamard(narrow(t, 64, 128))
    parts.append("queries")
    rotate(narrow(t, HEADS, D), torch.empty(t, 32), torch.empty(t, 32))
    parts.append("streams")
    fn, scale, base = torch.empty(24, 4 * HIDDEN), torch.empty(3), torch.empty(24)
    read_streams(narrow(t, 4, HIDDEN), fn, scale, base, 20, 1e-6, 1e-6, torch.empty(HIDDEN), 1e-6)


def told():
    found = {name: {kernel: len(those) for kernel, those in by_kernel.items()} for name, by_kernel in keys.items()}
    keys.clear()
    return found


def main():
    driver.set_active(NoDevice(90))
    JITFunction.run = note
    for position in POSITIONS:
        attention(position, 1)
        compressors(position, 1)
    products(1)
    decode = told()
    for t in SIZES:
        attention(4096, t)
        compressors(4096, t)
        products(t)
    print(json.dumps({"decode": decode, "prefill": told()}))


if __name__ == "__main__":
    main()
