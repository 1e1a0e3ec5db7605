"""CoDA's banks as Llama-3.1-8B has them: 256 + 64 + 64 slots of 8 KV heads of 128."""

import torch

from fathom.kernels.differential.banks import Bank, Banks, Rules, evict

SLOTS = torch.empty(2, 8, 384, 128, dtype=torch.bfloat16)
USED = torch.empty(384, dtype=torch.bool)
EXACT, SUMMARY = (Bank(SLOTS[:, :, low : low + 64], USED[low : low + 64], torch.empty(8, 64), 64) for low in (256, 320))
LONG = {"dtype": torch.int64}
BANKS = Banks(EXACT, SUMMARY, torch.empty(64, **LONG), torch.empty(2, **LONG), torch.empty(11, **LONG))
RULES = Rules(0.1, 0.05, 0.9, 0.7, False, True, False, False, 1_000_000, False, torch.empty(128), torch.empty(8))

CASES = {
    "a step": lambda: evict(BANKS, RULES, SLOTS[:, :, :256], torch.empty(256), torch.tensor(0), torch.tensor(256), 1)
}
