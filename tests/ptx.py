"""PTX text, run line by line on integers: what inline assembly says can be held against what stands for it."""

import re

import torch

_LINE = re.compile(r"\s*([^;{}]*(?:\{[^}]*\})?[^;{}]*);")


def _permuted(a, b, select):
    """``prmt.b32`` of the PTX manual, default mode: bit 3 of a selector's nibble repeats the sign of the byte."""
    found = torch.zeros_like(select)
    for place in range(4):
        nibble = select >> (4 * place) & 15
        byte = torch.where((nibble & 4) != 0, b >> (8 * (nibble & 3)), a >> (8 * (nibble & 3))) & 255
        found |= torch.where((nibble & 8) != 0, (byte >> 7) * 255, byte) << (8 * place)
    return found


def _halves_of_e4m3(pair):
    """``cvt.rn.f16x2.e4m3x2``: exact; the machine's own conversion is torch's by the manual's word."""
    codes = torch.stack([pair & 255, pair >> 8], -1).to(torch.uint8).view(torch.float8_e4m3fn)
    low, high = (half.view(torch.int16).long() & 0xFFFF for half in codes.half().unbind(-1))
    return low | high << 16


def _products_of_bf16(a, b):
    """``mul.bf16x2``: of both halves, each rounded once."""
    factors = (torch.stack([x & 0xFFFF, x >> 16], -1).to(torch.uint16).view(torch.bfloat16).double() for x in (a, b))
    first, second = factors
    low, high = ((first * second).bfloat16().view(torch.int16).long() & 0xFFFF).unbind(-1)
    return low | high << 16


def _looked_up(a, b, c, table):
    """``lop3.b32``: bit 4a + 2b + c of the table, of each bit."""
    held = [(a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) for n in range(8) if int(table) >> n & 1]
    found = torch.zeros_like(a)
    for one in held:
        found |= one
    return found & 0xFFFFFFFF


INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "shr.b32": lambda a, n: a >> n,
    "shr.u32": lambda a, n: a >> n,
    "lop3.b32": _looked_up,
    "prmt.b32": _permuted,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "mul.bf16x2": _products_of_bf16,
    "cvt.rn.f16x2.e4m3x2": _halves_of_e4m3,
}


def run(text, given):
    """Registers after the text: `given` are those before it, int64 [n] of 32 bits each, by name ("$2")."""
    held = dict(given)

    def value(name):
        return held[name] if name in held else torch.tensor(int(name, 0))

    for line in _LINE.findall(text.strip().removeprefix("{")):
        name, _, rest = line.strip().partition(" ")
        if name == ".reg":
            continue
        if name == "mov.b32":
            low, high, source = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest).groups()
            held[low], held[high] = value(source) & 0xFFFF, value(source) >> 16
        else:
            to, *operands = (part.strip() for part in rest.split(","))
            held[to] = INSTRUCTIONS[name](*map(value, operands))
    return held
