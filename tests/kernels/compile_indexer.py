"""Selection of V4-Flash (top 512) and V4-Pro (top 1024), whose indexers are alike, in the four forms of keys."""

import torch

from fathom.kernels.formats import coded_rows, rows
from fathom.kernels.indexer.triton import index_scores, select, select_fp8

CPU = torch.device("cpu")
KEYS = {
    "bf16": torch.empty(262144, 128, dtype=torch.bfloat16),
    "fp8": rows.fp8_keys(262144, 128, CPU),
    "fp4": rows.fp4_keys(262144, 128, CPU),
    "codes": coded_rows.allocate(262144, 128, 8, CPU, seed=0),
}


def selection(t, keys, k, op=select):
    q, weights = torch.empty(t, 64, 128, dtype=torch.bfloat16), torch.empty(t, 64)
    return lambda: op(q, weights, keys, 1 << 20, 4, k)


DECODE = {form: {f"decode, V4-Flash, {form}": selection(1, keys, 512)} for form, keys in KEYS.items()}
BLACKWELL = DECODE["fp4"] | DECODE["codes"]
BLACKWELL["decode, V4-Flash, FP8 scores"] = selection(1, KEYS["fp8"], 512, select_fp8)
CASES = BLACKWELL | DECODE["fp8"] | DECODE["bf16"]
MORE = {f"prefill, V4-Pro, {form}": selection(512, keys, 1024) for form, keys in KEYS.items()}
MORE["prefill, V4-Pro, FP8 scores"] = selection(512, KEYS["fp8"], 1024, select_fp8)
MORE["fp32"] = lambda: index_scores(torch.empty(8, 64, 128), torch.empty(8, 64), KEYS["fp8"])
