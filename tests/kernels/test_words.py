"""Words of E2M1 and E4M3 codes in fp32: the text that a GPU runs, evaluated line by line, and what stands for it.

That the machine's own conversion of two E4M3 codes is torch's is its manual's word (PTX ISA, `cvt`); all else is shown.
"""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not on every platform")

import triton
import triton.language as tl

from fathom.kernels.formats.triton import E2M1_WORD, E4M3_WORD, e2m1_word, e4m3_word
from fathom.kernels.formats.triton_rounding import UPCAST

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
WORDS = torch.randint(-(1 << 31), 1 << 31, (4096,), generator=torch.Generator().manual_seed(1)).int()


def evaluated(text, given):
    """Outputs of PTX text: registers by name, `given` the input, all of uint32 [n]."""
    outputs = max(int(number) for number in re.findall(r"\$(\d+)", text))
    held = {f"${outputs}": given}

    def value(name):
        return held[name] if name in held else np.uint32(int(name, 0))

    binary = {"and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "shl.b32": np.left_shift, "shr.b32": np.right_shift}
    for line in re.findall(r"\s*([^;{}]*(?:\{[^}]*\})?[^;{}]*);", text.strip().removeprefix("{")):
        op, _, rest = line.strip().partition(" ")
        if op == ".reg":
            continue
        if op == "mov.b32":
            low, high, source = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest).groups()
            held[low], held[high] = value(source) & 0xFFFF, value(source) >> 16
        elif op == "cvt.rn.f16x2.e4m3x2":
            target, source = rest.split(", ")
            pair = value(source).astype(np.uint16).view(np.uint8).reshape(-1, 2)
            halves = torch.from_numpy(pair.copy()).view(torch.float8_e4m3fn).half()
            held[target] = halves.view(torch.int32).numpy().view(np.uint32)[:, 0]
        else:
            target, *operands = rest.split(", ")
            held[target] = binary[op](*map(value, operands))
    return [held[f"${n}"] for n in range(outputs)]


def columns(pairs):
    """Both fp16 numbers of each output, as a kernel puts them in order: its halves are columns."""
    return [torch.from_numpy(pair.astype(np.uint32).view(np.float16).copy()).view(-1, 2).float() for pair in pairs]


def nibbles(words):
    codes = words.view(torch.uint8).view(-1, 4).long()
    return torch.stack([codes & 15, codes >> 4], 2).flatten(1)


def test_the_text_of_e2m1_says_each_code_at_each_place():
    first, second, third, fourth = columns(evaluated(E2M1_WORD.value, WORDS.numpy().view(np.uint32)))
    found = torch.stack([first, second, third, fourth], 1)  # outputs have columns 0 and 2, 1 and 3, 4 and 6, 5 and 7
    order = found[:, [0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1, 0, 0, 1, 1]] * 64
    wanted = torch.tensor(E2M1)[nibbles(WORDS)]
    assert torch.equal(order, wanted)
    assert torch.equal(order.signbit(), wanted.signbit())
    assert len({(code, place) for row in nibbles(WORDS).tolist() for place, code in enumerate(row)}) == 16 * 8


def test_the_text_of_e4m3_says_each_code_at_each_place():
    low, high = columns(evaluated(E4M3_WORD.value, WORDS.numpy().view(np.uint32)))
    bytes_ = WORDS.view(torch.uint8).view(-1, 4)
    wanted = bytes_.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(torch.cat([low, high], 1), wanted, rtol=0, atol=0, equal_nan=True)
    assert len({(code, place) for row in bytes_.tolist() for place, code in enumerate(row)}) == 256 * 4


@triton.jit
def _decoded(words, out, N: tl.constexpr, FOUR: tl.constexpr, UPCAST: tl.constexpr):
    place = tl.arange(0, N)
    word = tl.load(words + place)
    if FOUR:
        c0, c1, c2, c3, c4, c5, c6, c7 = e2m1_word(word, UPCAST)
        tl.store(out + place * 8 + 4, c4)
        tl.store(out + place * 8 + 5, c5)
        tl.store(out + place * 8 + 6, c6)
        tl.store(out + place * 8 + 7, c7)
    else:
        c0, c1, c2, c3 = e4m3_word(word, UPCAST)
    EACH: tl.constexpr = 8 if FOUR else 4
    tl.store(out + place * EACH, c0)
    tl.store(out + place * EACH + 1, c1)
    tl.store(out + place * EACH + 2, c2)
    tl.store(out + place * EACH + 3, c3)


@pytest.mark.parametrize("four", [True, False])
def test_kernels_have_them_in_the_order_of_columns(four):
    out = torch.empty(len(WORDS), 8 if four else 4)
    _decoded[1,](WORDS, out, N=len(WORDS), FOUR=four, UPCAST=UPCAST)
    codes = WORDS.view(torch.uint8).view(-1, 4)
    wanted = torch.tensor(E2M1)[nibbles(WORDS)] / 64 if four else codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
