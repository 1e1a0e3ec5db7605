"""Rows that V4-Pro and V4-Flash send over eight ranks: codes with scales, and outputs in bf16."""

import torch

from fathom.kernels.exchange.triton import push


def pushed(rows, width, dtype, places=torch.int32):
    given = torch.empty(rows, width, dtype=dtype), torch.empty(rows, 8, dtype=places)
    return lambda: push(*given, torch.empty(8, dtype=torch.int64))


CASES = {
    "V4-Pro, codes": pushed(1, 7224, torch.uint8),
    "V4-Flash, outputs": pushed(6, 4096, torch.bfloat16, torch.int64),
}
MORE = {"words of four bytes": pushed(1, 1807, torch.float32)}
