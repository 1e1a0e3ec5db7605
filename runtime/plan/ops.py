"""What each cpu op takes while it runs: the most bytes alive at one moment beside its operands, result included.

Read off `kernels.blocked` and `kernels.reference` line by line. Terms that do not grow with the call (a row of scales,
a list of positions) are left out where a tile beside them is a thousand times larger; `TILE_SLACK` stands for them. A
test holds each against what torch's profiler counts.
"""

from typing import NamedTuple

from kernels.attention import cpu as attention
from kernels.formats import basis_rows
from kernels.hyper import cpu as hyper
from kernels.indexer import cpu as indexer
from kernels.linear import cpu as linear
from kernels.quantise import cpu as quantise
from model.checkpoint.binding import Form
from runtime.plan import selection

F32, F64, I64 = 4, 8, 8  # bytes
TILE_SLACK = 1 << 16
CODED = 3 * F32 + 2  # bytes that a number of a coded row takes while it is decoded: word, centroid, product, code


class Costs(NamedTuple):
    """What the bytes of an op depend on besides its sizes."""

    item: int  # bytes of an activation: 2 (bf16) or 4 (fp32)
    deployed: bool  # whether inputs of quantised linears are rounded
    narrow: bool  # whether products of bf16 with what bf16 holds exactly are made in bf16, see `kernels.linear.cpu`
    integers: bool = False  # whether the processor multiplies those of 8 bits, see `kernels.indexer.bound`
    gpu: bool = False
    entries: str = "dtype"  # forms of a cache's rows, see `model.cache.formats`
    keys: str = "dtype"
    coded: bool = False  # whether some layer's rows are codes, see `kernels.formats.rotation`
    based: bool = False  # whether some layer's entries are coefficients, see `kernels.formats.basis_rows`
    banked: int = 0  # rows that a layer attends to beside those it selects, see `model.variants.banked_entries`

    def rms_norm(self, vectors: int, width: int) -> int:
        """`rms_norm` of so many vectors."""
        result = 0 if self.item == F32 else vectors * width * self.item  # fp32: what it computes in
        return vectors * (width + 2) * F32 + result + TILE_SLACK

    def rotate(self, tokens: int, heads: int, width: int, rope: int) -> int:
        """`rotate` of so many tokens' vectors, of which `rope` dims turn."""
        vectors, angles = tokens * heads, tokens * rope * F32
        return vectors * (rope * F32 + width * self.item) + angles + TILE_SLACK

    def simulate(self, numbers: int) -> int:
        """`simulate_fp8` and `simulate_fp4` of so many numbers."""
        tile = min(numbers, quantise.TILE)
        wide = 0 if self.item == F32 else tile * F32
        return numbers * self.item + wide + 3 * tile * F32 + TILE_SLACK

    def hadamard(self, vectors: int, width: int) -> int:
        """`hadamard` of so many vectors."""
        matrix = width * width * F32
        return max(2 * F32 * vectors * width + matrix, matrix * 9 // 4) + TILE_SLACK  # built of halves and a quarter

    def linear(self, tokens: int, rows: int, columns: int, form: Form, groups: int = 1) -> int:
        """`linear`, or `grouped_linear` where every group of rows has `columns` of its own."""
        out = tokens * rows * self.item
        if tokens <= (linear.FEW if groups == 1 else 1) and (form, self.item) in ((Form.BF16, 2), (Form.F32, F32)):
            return 2 * out + TILE_SLACK
        if tokens == groups == 1 and form in (Form.BF16, Form.F16, Form.F32):
            return min(rows, max(1, linear.ROWS // columns)) * columns * F32 + rows * F32 + out + TILE_SLACK
        operand = self._operand(form)
        wide = 0 if operand == self.item else tokens * groups * columns * operand
        step = min(rows, max(128, linear.TILE // columns // 128 * 128))
        if (form, operand) in ((Form.F32, F32), (Form.BF16, 2)):  # a view of the weight
            return out + wide + tokens * min(step, rows // groups) * operand + TILE_SLACK
        tile = step * columns * operand
        previous = tile if step < rows else 0
        decoded = max(self._decoding(form, step * columns), step * columns * (F32 + 2) if operand == 2 else 0)
        product = tile + tokens * min(step, rows // groups) * operand
        return out + wide + max(previous + decoded, product) + TILE_SLACK

    def rounded_linear(self, tokens: int, rows: int, columns: int, form: Form) -> int:
        """`Arithmetic.linear`: its input is rounded first, where the run is deployed and the weight quantised so."""
        product = self.linear(tokens, rows, columns, form)
        if not self.deployed or form not in (Form.FP8, Form.FP8_F32, Form.FP4):
            return product
        return max(self.simulate(tokens * columns), tokens * columns * self.item + product)

    def _operand(self, form: Form) -> int:
        exact = form in (Form.BF16, Form.FP8, Form.FP4)
        return 2 if exact and self.item == 2 and self.narrow else F32

    def _decoding(self, form: Form, weights: int) -> int:
        """What decoding a tile of so many weights takes, the fp32 result included."""
        if form in (Form.FP8, Form.FP8_F32):
            return weights * (F32 if self.gpu else F32 + 2)  # on the CPU, E4M3 goes through 16-bit integers
        if form in (Form.FP4, Form.NVFP4):
            return weights * (F32 + 2) + weights // 2  # bytes as indices; scales
        return weights * F32 if form in (Form.BF16, Form.F16) else 0

    def _entries_in_fp32(self) -> int:
        """Bytes that a number of an entry takes while a tile of them is made fp32, which the run's dtype may be."""
        if self.coded:
            return CODED + (2 * F32 if self.based else 0)  # coefficients, and these joined with the rope dims
        if self.entries == "fp8":
            return 2 * F32 + 2  # E4M3 through 16-bit integers, and beside its result
        return 0 if self.item == F32 else F32

    def _entries_gathered(self) -> int:
        """The same where they are gathered row by row, as stored, and the tile before is still there."""
        if self.coded or self.entries == "fp8":
            return F32 + self._entries_in_fp32() + 1
        return 2 * F32 if self.item == F32 else F32 + self.item

    def _keys_in_fp32(self) -> int:
        """The same of an index key; those in a narrow form are made bfloat16 first."""
        if self.coded:
            return CODED
        if self.keys != "dtype":
            return F32 + 2
        return 0 if self.item == F32 else F32

    def swiglu(self, numbers: int) -> int:
        """`swiglu` of so many numbers of gate and of up; numbers in fp32 are not copied first."""
        return (2 if self.item == F32 else 3) * F32 * numbers

    def attend(self, tokens: int, heads: int, width: int, keys: int, selected: int, window: int) -> int:
        """`attend` to tiles of `keys` in a row, or fewer; `selected` entries for each token, 0 where none are.

        `window`: of the tokens that a single token sees in it.
        """
        rows = min(tokens, max(1, attention.ROWS // heads))
        queries = rows * heads * width * F32
        inside = 2 * queries if self.coded else 0  # queries and values in the space of the codes
        turning = 2 * queries if self.coded else 0
        if self.based:
            turning += 2 * queries + width * width * F32
        shared = max(1, min(attention.LOGITS // (rows * heads), attention.KEYS // width, keys))
        stored = self._entries_in_fp32()
        tile = queries + shared * width * stored + rows * heads * shared * F32 + rows * shared
        if selected:
            each = min(selected, 256)
            some = min(rows, max(1, attention.KEYS // (each * width)))
            gathered = some * (each * (width * self._entries_gathered() + heads * F32 + I64) + heads * width * F32)
            chosen = rows * selected * (4 + I64 + 3)  # which, as they are and as an index, and whether each may be seen
            tile = max(tile, gathered) + chosen
        if tokens == 1 and not self.coded:
            tile = max(tile, self._one_token(heads, width, window + (selected or keys), selected))
        return tokens * heads * width * self.item + 2 * queries + inside + max(tile, turning) + TILE_SLACK

    def _one_token(self, heads: int, width: int, keys: int, selected: int) -> int:
        """What a single token that sees no more than a tile of keys puts side by side: see `attention._few_keys`."""
        seen = min(attention.KEYS // width, keys)
        stored = 0 if self.entries != "dtype" or self.item == F32 else selected * width * self.item
        return max(seen * (2 * width + 3 * heads) * F32 + stored, selected * width * self._entries_gathered())

    def coding(self, vectors: int, width: int) -> int:
        """`kernels.formats.basis_rows.write` of so many vectors: exact products, and what a gain loses."""
        if not self.based:
            return 0
        gains = 4 * F32 * len(basis_rows.GAINS) * min(vectors, basis_rows.ROWS) * width
        return vectors * width * 2 * F32 + max(vectors * width * 5 * F64 + width * width * F64, gains) + TILE_SLACK

    def select(self, tokens: int, heads: int, width: int, visible: int, k: int, *, few_pass: bool = False) -> int:
        """`select` among `visible` entries; `few_pass`: where few of them pass its comparisons."""
        result = tokens * min(k, visible) * 4 + TILE_SLACK
        rows = min(tokens, max(1, indexer.ROWS // heads))
        if visible <= k:
            return result + rows * visible * (I64 + 4)
        widened = self._keys_in_fp32()
        work = selection.select(rows, heads, width, visible, k, widened, few_pass=few_pass)
        if self.integers and selection.bounded(heads, width, visible, k, tokens):
            rows = min(tokens, max(1, indexer.BOUNDED_ROWS // heads))
            work = max(work, selection.select_bounded(rows, heads, width, visible, k, widened, few_pass=few_pass))
        return result + work

    def hyper_weights(self, tokens: int, streams: int, hidden: int) -> int:
        """`hyper_weights`."""
        mixes = (2 + streams) * streams
        turned = mixes * streams * hidden * F32 if tokens > 1 else 0
        small = tokens * (2 * mixes + 6 * streams * streams) * F32
        return turned + 2 * self._tile_of_streams(tokens, streams, hidden) + small + TILE_SLACK

    def collapse(self, tokens: int, streams: int, hidden: int) -> int:
        """`collapse`."""
        tile = self._tile_of_streams(tokens, streams, hidden)
        product = hyper.TILE // streams * F32
        return (
            (1 + (tokens > 1)) * tokens * hidden * self.item + tile + min(product, tokens * hidden * F32) + TILE_SLACK
        )

    def expand(self, tokens: int, streams: int, hidden: int) -> int:
        """`expand`."""
        tile = min(max(1, hyper.TILE // (streams * hidden)), tokens) * streams * hidden * F32
        # the sum of a tile, and beside it the streams in fp32 or the sum of the tile before
        return tokens * streams * hidden * self.item + 2 * tile + tile // streams + TILE_SLACK

    def _tile_of_streams(self, tokens: int, streams: int, hidden: int) -> int:
        """A tile of the streams in fp32; in an fp32 run a view."""
        if self.item == F32:
            return 0
        return min(max(1, hyper.TILE // (streams * hidden)), tokens) * streams * hidden * F32

    def pool(self, tokens: int, width: int, *, overlap: bool) -> int:
        """`pool` of the windows that so many tokens close, of values and gates [tokens, width] for each series."""
        numbers = tokens * width * (2 if overlap else 1)
        joined = 2 * numbers * F32 if overlap else 0
        return joined + 2 * numbers * F32 + TILE_SLACK
