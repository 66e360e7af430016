"""Mistakes that a kernel could have: each is a change of its text, and the problem whose test must fail."""

from __future__ import annotations

from typing import NamedTuple

from saccade.testing.cases import Case
from saccade.testing.recurrent import Sizes

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
LANES = "simdgroup_barrier(mem_flags::mem_threadgroup);"


class Mutant(NamedTuple):
    """nth: the occurrence of `old` that becomes `new`, from 0; sanitizer: which one must report it, "" for none."""

    name: str
    kernel: str
    old: str
    new: str
    problem: str
    sanitizer: str = ""
    nth: int = 0


# more rows than keys: the first rows see none; the second entry is shorter; two chunks per row; groups of two heads
_TALL = Case("tall", 45, 37, B=2, Hq=4, Hk=2, D=72, Dv=72, mask="causal() & keys([37, 20])")
PROBLEMS = {
    "tall": _TALL,
    "small": Case("small", 19, 35, Hq=2, Hk=1, D=20, Dv=20, mask="causal()"),
    "union": Case("union", 30, 30, Hq=2, Hk=1, D=16, Dv=16, mask="keys(10) | window(3, 3)"),
    "decode": Case("decode", 1, 300, B=2, Hq=4, Hk=2, D=40, Dv=40, sinks=True),
    "strided": Case("strided", 30, 41, Hq=2, Hk=1, D=16, Dv=16, mask="strided(4) | window(3, 0)", sinks=True),
    "strided-not": Case("strided-not", 30, 41, Hq=2, Hk=1, D=16, Dv=16, mask="~strided(3) & causal()"),
    "documents": Case(
        "documents", 40, 40, Hq=2, Hk=1, D=16, Dv=16, mask=f"documents({[0] * 11 + [1] * 16 + [2] * 13})"
    ),
    "columns": Case(
        "columns", 40, 40, Hq=2, Hk=1, D=16, Dv=16,
        mask=f"causal() & ~columns({[j // 2 for j in range(40)]}, {[j // 2 + j % 9 for j in range(40)]})",
    ),
    "tiles": Case("tiles", 20, 24, Hq=2, Hk=1, D=16, Dv=16, mask="tiles([[1, 0, 1], [0, 1, 1], [1, 0, 0]], (7, 8))"),
    "scores": Case("scores", 21, 26, B=2, Hq=4, Hk=2, D=16, Dv=16, mask="causal()", scale=0.3, softcap=2.0, alibi="bh"),
    "table": Case("table", 21, 26, B=2, Hq=4, Hk=2, D=16, Dv=16, mask="causal()", relative="bh"),
    "gates": Case("gates", 21, 26, B=2, Hq=4, Hk=2, D=16, Dv=16, mask="causal()", gates=True),
    "bias": Case("bias", 21, 26, B=2, Hq=4, Hk=2, D=16, Dv=16, mask="causal()", bias="bhqk", dropout=0.3),
}  # fmt: skip

# linear attention: sequences of one, no and two chunks; groups of heads; keys of two tiles
LINEAR_PROBLEMS = {
    "linear": ("linear-elu+1", Sizes(1, 71, 4, 2, 40, 13, borders=(0, 26, 26, 71))),
    "linear-sums": ("linear-sums", Sizes(2, 41, 2, 1, 8, 12)),
    "linear-all": ("linear-all", Sizes(2, 41, 2, 1, 8, 12)),
}

# kinds of codes of keys and values
CODES_PROBLEMS = ("int8", "fp8", "int4")

FORWARD = (
    Mutant("no barrier before keys", "forward", BARRIER, "", "small", "thread"),
    Mutant("no barrier after keys", "forward", BARRIER, "", "small", "thread", 1),
    Mutant("no barrier before values", "forward", BARRIER, "", "small", "thread", 2),
    Mutant("no barrier after values", "forward", BARRIER, "", "small", "thread", 3),
    Mutant("scores read before they are written", "forward", LANES, "", "small", "thread", 2),
    Mutant("weights read before they are written", "forward", LANES, "", "small", "thread", 3),
    Mutant("a barrier that some threads miss", "forward", BARRIER, f"if (tid < 32) {BARRIER}", "tall", nth=1),
    Mutant("too small a tile", "forward", "T staged[BC *", "T staged[BC / 2 *", "tall"),
    Mutant("keys past the last one are read", "forward", "a < rows.stop && c < n", "c < n", "small", "address"),
    Mutant("columns past the last one are read", "forward", "a < rows.stop && c < n", "a < rows.stop", "small"),
    Mutant("rows past the last one are written", "forward", "if (a >= p.n_q) continue;", "", "tall"),
    Mutant("keys past the last one count", "forward", "key < stop && ", "", "tall"),
    Mutant("the sum is not corrected", "forward", "kept_l = l * fix", "kept_l = l", "tall"),
    Mutant("o is not corrected", "forward", "old * fixes[e]", "old", "tall"),
    Mutant("the maximum of half a row", "forward", "top = max(top, simd_shuffle_xor(top, 2));", "", "tall"),
    Mutant("the sum of half a row", "forward", "l += simd_shuffle_xor(l, 2);", "", "tall"),
    Mutant(
        "the first chunk of values only", "forward", "const float old = out[(c + d) / 8]",
        "const float old = out[d / 8]", "tall",
    ),
    Mutant("keys not transposed", "forward", "width, ulong2(0, 0), true)", "width, ulong2(0, 0), false)", "tall"),
    Mutant("the wrong key head", "forward", "p.hk = h / dims.G", "p.hk = h % dims.Hk", "tall"),
    Mutant("no scale", "forward", "x * (dims.scale * LOG2E)", "x * LOG2E", "tall"),
    Mutant("lse in units of log 2", "forward", "precise::log(sum)", "precise::log2(sum)", "tall"),
    Mutant(
        "a row without keys has a finite lse", "forward", "const float mine = none ? dims.minus_inf :",
        "const float mine =", "tall",
    ),
    Mutant("one key too few behind", "forward", "d <= f[1]", "d < f[1]", "strided"),
    Mutant("one key too few ahead", "forward", "d >= f[0]", "d > f[0]", "tall"),
    Mutant("one key too many", "forward", "j < f[3]", "j <= f[3]", "union"),
    Mutant("the bands of the first entry", "forward", "(side[dir + 1] != 0 ? p.b * bands * 8 : 0)", "0", "tall"),
    Mutant("the other residues", "forward", "== (f[6] > 0)", "!= (f[6] > 0)", "strided-not"),
    Mutant("outside the rows", "forward", "side[at[0] + row] <= x", "side[at[0] + row] < x", "documents"),
    Mutant("inside for outside", "forward", "inside == ((code & 2) != 0)", "inside", "columns"),
    Mutant("rows of queries for rows of keys", "forward", "(code & 4 ? j : t)", "t", "columns"),
    Mutant("blocks transposed", "forward", "j / at[8] * at[5] + t / at[7]", "t / at[8] * at[5] + j / at[7]", "tiles"),
    Mutant("the wrong weights are dropped", "forward", "x[j & 3] >=", "x[0] >=", "bias"),
    Mutant(
        "dropped weights missing from the sum", "forward", "        sum += w;\n        if (DROPOUT && w != 0.0f)",
        "        if (DROPOUT && w != 0.0f)", "bias",
    ),
    Mutant("the bias of another head", "forward", "long(h) * dims.bias_h", "long(p.hk) * dims.bias_h", "bias"),
    Mutant("no softcap", "forward", "dims.softcap * precise::tanh(s / dims.softcap)", "s", "scores"),
    Mutant("slopes of the first entry", "forward", "p.b * dims.slopes_stride", "0", "scores"),
    Mutant(
        "the table of the first head", "forward", "p.b * dims.distances_stride + h * dims.distances_row",
        "p.b * dims.distances_stride", "table",
    ),
    Mutant(
        "the table of other positions", "forward", "p.b * dims.offset_stride] - j]);",
        "p.b * dims.offset_stride] - j - 1]);", "table",
    ),
    Mutant("gates of the first entry", "forward", "(p.b * dims.Hq + h) * dims.Tk", "h * dims.Tk", "gates"),
    Mutant("signed distances", "forward", "return fabs(float(t +", "return (float(-t -", "scores"),
    Mutant("the sink counts in every part", "forward", "if (SINKS) total", "if (true) total", "strided"),
    Mutant("earlier parts are lost", "forward", "MERGE && old_share[r] != 0.0f", "false", "strided"),
    Mutant("earlier parts are not weighed", "forward", "y += old_share[r] * before", "y += before", "strided"),
    Mutant("the group's first head for all", "forward", "p.hk * dims.G + a % dims.G", "p.hk * dims.G", "decode"),
    Mutant(
        "every chunk from the first key", "forward", "const int low = PACKED ? int(group.y) * dims.chunk_keys : 0;",
        "const int low = 0;", "decode",
    ),
    Mutant("chunks are not weighed", "combine", "precise::exp(mine - top);\n    sum", "1.0f;\n    sum", "decode"),
    Mutant(
        "a chunk is left out", "combine", "int n = 0; n < dims.chunks; n++) {",
        "int n = 1; n < dims.chunks; n++) {", "decode",
    ),
    Mutant("the sink of another head", "combine", "side[dims.o_sinks + h]", "side[dims.o_sinks]", "decode"),
)  # fmt: skip

BACKWARD = (
    Mutant("no barrier in a sum of gradients", "gradients", BARRIER, "", "small", "thread"),
    Mutant("no barrier after its rows", "gradients", BARRIER, "", "small", "thread", 1),
    Mutant("no barrier before the other products", "gradients", BARRIER, "", "small", "thread", 4),
    Mutant("dO is read past its end", "gradients", "a < rows.stop && c < n", "c < n", "small", "address"),
    Mutant("no delta", "gradients", "dp * keep - stat[2]", "dp * keep", "tall"),
    Mutant("no scale", "gradients", "g * (dims.scale *", "g * (1.0f *", "tall"),
    Mutant("the first head of the group only", "gradients", "g < heads;", "g < 1;", "tall"),
    Mutant("the lists of the first tile", "gradients", "+ a0 / LIST;", "+ 0;", "tall"),
    Mutant("rows past the last one are written", "gradients", "if (a >= stop) continue;", "", "tall"),
    Mutant("queries past the last one count", "gradients", "&& b < stop && (", "&& (", "tall"),
    Mutant(
        "rows and columns exchanged", "gradients", "t_of(dims, p, KEYS ? b : a)",
        "t_of(dims, p, KEYS ? a : b)", "tall",
    ),
    Mutant(
        "no slope of the softcap", "gradients", "return 4.0f * e / ((1.0f + e) * (1.0f + e));",
        "return 1.0f;", "scores",
    ),
    Mutant("gradients of slopes of one SIMD-group", "gradients", "slope = simd_sum(slope);", "", "scores"),
    Mutant("earlier gradients are lost", "gradients", "(MERGE ? before[at + c] : 0.0f)", "0.0f", "strided"),
    Mutant("dropped weights in dV", "gradients", "SUMS ? w : w * keep", "w", "bias"),
    Mutant("delta without dlse", "delta", "DLSE ? total - dlse[row] : total", "total", "tall"),
    Mutant(
        "the next diagonal", "bias_gradient", "n - dims.Tk - at : key", "n - dims.Tk - at - 1 : key", "table",
    ),
    Mutant("excluded pairs in the bias", "bias_gradient", "if (!allowed(dims, side, p, t, j)) continue;", "", "bias"),
)  # fmt: skip

LINEAR = (
    Mutant("no barrier before rows", "linear_states", BARRIER, "", "linear", "thread"),
    Mutant("no barrier after rows", "linear_states", BARRIER, "", "linear", "thread", 1),
    Mutant("no barrier before rows", "linear_outputs", BARRIER, "", "linear", "thread"),
    Mutant("no barrier after rows", "linear_outputs", BARRIER, "", "linear-sums", "thread", 1),
    Mutant("no barrier before weights and values", "linear_outputs", BARRIER, "", "linear-sums", "thread", 2),
    Mutant("no barrier after values", "linear_outputs", BARRIER, "", "linear-sums", "thread", 3),
    Mutant("scores read before they are written", "linear_outputs", LANES, "", "linear-sums", "thread", 2),
    Mutant("totals read before they are written", "linear_outputs", LANES, "", "linear", "thread", 3),
    Mutant("tokens past the chunk count", "linear_states", "a < chunk.count && c", "c", "linear"),
    Mutant("tokens are read past the last one", "linear_states", "a < chunk.count && c", "c", "linear-sums", "address"),
    Mutant("columns past the last one count", "linear_outputs", " && c < width_of<ROLE>()", "", "linear"),
    Mutant("tokens past the chunk are written", "linear_outputs", "if (a >= chunk.count) continue;", "", "linear-sums"),
    Mutant("a token does not see itself", "linear_outputs", ": j <= first + row;", ": j < first + row;", "linear"),
    Mutant("a key is not seen by its query", "linear_outputs", "? j >= first + row", "? j > first + row", "linear"),
    Mutant("the wrong key head", "linear_states", "h / (dims.H / dims.Hk)", "h % dims.Hk", "linear"),
    Mutant("only the first head of the group", "linear_outputs", "h < h0 + group", "h < h0 + 1", "linear"),
    Mutant("a state not transposed", "linear_outputs", "OF_KEYS ? long(c) * W + d :", "", "linear"),
    Mutant(
        "the first chunk's state for all", "linear_outputs", "CAUSAL ? slot : chunk.sequence", "chunk.sequence",
        "linear-sums",
    ),
    Mutant("the chunk's number for the sequence's", "linear_outputs", "CAUSAL ? slot :", "true ? slot :", "linear-all"),
    Mutant(
        "no initial state", "linear_states", "INITIAL && there[e][n] ? initial[from] : 0.0f", "0.0f",
        "linear-sums",
    ),
    Mutant("the state after its chunk", "linear_states", "(BACKWARD ? mine[1] - 1 - i : i)", "i", "linear"),
    Mutant("keys of queries", "linear_states", "BACKWARD ? QUERY : KEY", "KEY", "linear-sums"),
    Mutant("keys not transposed", "linear_states", "pitch, ulong2(0, 0), TRANSPOSED", "pitch", "linear-sums"),
    Mutant("no slope of the feature map", "linear_outputs", "x *= slope_of(float(q[to + c]))", "", "linear"),
    Mutant("the slope of q for k", "linear_outputs", "x *= slope_of(float(k[", "x *= slope_of(float(q[", "linear"),
    Mutant(
        "the map's other branch", "linear_outputs", "x > 0.0f ? x + 1.0f : precise::exp(x)", "x + 1.0f", "linear"
    ),
    Mutant("no gradient of the divisor", "linear_outputs", ": given.stats[2 * row + 1]", ": 0.0f", "linear"),
    Mutant("a quarter of the divisor", "linear_outputs", "total += simd_shuffle_xor(total, 1);", "", "linear"),
    Mutant("the divisor without its own chunk", "linear_outputs", "total += triangle(", "triangle(", "linear"),
    Mutant("no scale", "linear_outputs", "x *= dims.scale;", "", "linear-sums"),
    Mutant("no scale of a gradient", "linear_states", ": dims.scale;", ": 1.0f;", "linear-sums"),
    Mutant("the divisor's gradient has no sign", "linear_delta", "= -((sums", "= ((sums", "linear"),
)  # fmt: skip

CODES = (
    Mutant("codes without a sign", "forward", "byte > 127 ? byte - 256 : byte", "byte", "int8"),
    Mutant("the first group's scale for all", "forward", " + c / GROUP]", "]", "int8"),
    Mutant("one group too few per row", "forward", "(n + GROUP - 1) / GROUP", "n / GROUP", "int8"),
    Mutant("scales of values for those of keys", "forward", "rows_of(k, k_scales)", "rows_of(k, v_scales)", "int8"),
    Mutant("the halves of a byte exchanged", "forward", "c < n / 2 ? byte & 15", "c >= n / 2 ? byte & 15", "int4"),
    Mutant("codes from 0", "forward", "byte >> 4) - 8)", "byte >> 4))", "int4"),
    Mutant("exponents one too large", "forward", "exponent + 120", "exponent + 121", "fp8"),
    Mutant("fp8 codes without a sign", "forward", "byte > 127 ? -size : size", "size", "fp8"),
)  # fmt: skip
