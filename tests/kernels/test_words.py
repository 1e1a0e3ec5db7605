"""Words of E2M1 and E4M3 codes in fp32: the text that a GPU runs (`tests.ptx`), and what stands for it elsewhere."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not on every platform")

import triton
import triton.language as tl

from fathom.kernels.formats.triton import E2M1_WORD, E4M3_WORD, e2m1_word, e4m3_word
from fathom.kernels.formats.triton_rounding import UPCAST
from tests.ptx import run

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
WORDS = torch.randint(-(1 << 31), 1 << 31, (4096,), generator=torch.Generator().manual_seed(1)).int()


def columns(text, outputs):
    """Both fp16 numbers of each output [n, 2], as a kernel puts them in order: its halves are columns."""
    held = run(text, {f"${outputs}": WORDS.long() & 0xFFFFFFFF})
    return [held[f"${n}"].int().view(torch.int16).view(torch.float16).view(-1, 2).float() for n in range(outputs)]


def nibbles(words):
    codes = words.view(torch.uint8).view(-1, 4).long()
    return torch.stack([codes & 15, codes >> 4], 2).flatten(1)


def test_the_text_of_e2m1_says_each_code_at_each_place():
    first, second, third, fourth = columns(E2M1_WORD.value, 4)
    found = torch.stack([first, second, third, fourth], 1)  # outputs have columns 0 and 2, 1 and 3, 4 and 6, 5 and 7
    order = found[:, [0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1, 0, 0, 1, 1]] * 64
    wanted = torch.tensor(E2M1)[nibbles(WORDS)]
    assert torch.equal(order, wanted)
    assert torch.equal(order.signbit(), wanted.signbit())
    assert len({(code, place) for row in nibbles(WORDS).tolist() for place, code in enumerate(row)}) == 16 * 8


def test_the_text_of_e4m3_says_each_code_at_each_place():
    low, high = columns(E4M3_WORD.value, 2)
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
