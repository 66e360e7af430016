"""Recurrences over diagonal states on NVIDIA: lays out the arrays and launches their kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ...recurrent.diagonal import Convolution, Diagonal, GatedUnit, Scan
from .chip import on
from .diagonal_call import LANES, SPAN, ChannelLaunch
from .kernels import convolution, diagonal_shared, gated
from .kernels import diagonal as kernels
from .kernels.common import LOG2E
from .kernels.diagonal import Shared
from .kernels.diagonal_chunks import Borders, Carried, ChunkSums
from .launches import PLAIN, Launches
from .recurrent import misplaced
from .recurrent_call import far_apart, power_of_two
from .replay import replayed

TAKES_TENSORS = True
_ARRAYS = {"D", "z", "delta_bias", "bias", "initial_state", "cu_seqlens"}
TAKES = _ARRAYS | {"fixed_B", "fixed_C", "delta_softplus", "activation"}
LARGEST = 256
# the least number of programs that a sum over channels is split into
PARTS = 4096
# the tile of a convolution
TOKENS, CHANNELS = 32, 64


def unsupported(problem: Diagonal) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = misplaced(problem)
    if isinstance(problem, Scan) and problem.N > LARGEST:
        reasons.append(f"a channel has N = {problem.N} numbers of state: at most {LARGEST}")
    return reasons


def forward(problem: Diagonal, arrays: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(y [B, T, D], final state) of `problem.outputs`."""
    call = _call(problem, arrays)

    def compute(launches: Launches) -> list[Tensor]:
        call.launches = launches
        y, final = (call.result(spec) for spec in problem.outputs)
        if problem.S:
            call.forward(y, final)
        return [y, final]

    with on(call.first):
        # not replayed for packed sequences: torch writes the last states of those without tokens
        y, final = compute(PLAIN) if call.cu is not None else replayed(problem, call.x, compute)
    return y, final


def backward(
    problem: Diagonal, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
) -> dict[str, Tensor]:
    """Gradients of all arrays of the call by name, in their dtypes."""
    call = _call(problem, arrays)
    dy, dfinal = cotangents
    dy = call.first.new_zeros(problem.outputs[0].shape) if dy is None else dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    if not problem.S:
        return {n: torch.zeros_like(x) for n, x in arrays.items() if x is not None and n != "cu_seqlens"}
    with on(call.first):
        return call.backward(dy, dfinal)


class _Scan(ChannelLaunch):
    def __init__(self, problem: Scan, arrays: Mapping[str, Any]) -> None:
        super().__init__(problem, arrays)
        p = problem
        # kernels compute powers of 2 and read A one slot after another
        rate = torch.mul(arrays["A"].float().t(), LOG2E.value, out=self.scratch(p.N, p.D))
        u, delta, z = (self.channels(name) for name in ("u", "delta", "z"))
        parameters = self.small("D"), self.small("delta_bias"), self.cu, self.initial
        self.x = kernels.Scan(u, delta, z, rate, _shared(arrays["B"]), _shared(arrays["C"]), None, None, *parameters)

    def config(self, **sizes: Any) -> kernels.Config:
        """The constants that the kernels of this call are compiled with."""
        p = self.p
        return kernels.Config(p.N, p.delta_softplus, p.fixed_B, p.fixed_C, p.dtype == "float32", self.C, **sizes)

    def launch(self, kernel: Any, span: int, *args: Any, **more: Any) -> None:
        """Launch a kernel whose programs own a chunk and LANES channels of a group each."""
        p = self.p
        blocks = -(-(p.D // p.G) // LANES)
        size, config = self.size(span, p.G, blocks), self.config(BD=LANES, SPAN=span, **more)
        self.line(kernel, self.slots(span) * p.G * blocks, self.x, *args, size, config)

    def turn(self) -> None:
        """Transpose B and C into the layout that the kernels of channels read."""
        p, tiles = self.p, self.slots(self.C)
        turned = dict[str, Tensor]()
        for name, fixed in (("B", p.fixed_B), ("C", p.fixed_C)):
            if not fixed:
                to = turned[f"turned_{name}"] = self.scratch(tiles, p.G, p.N, self.C)
                sizes = {"N": p.N, "BN": power_of_two(p.N), "C": self.C}
                size = self.size(self.C, p.G)
                self.line(kernels.turn, tiles * p.G, getattr(self.x, name), to, self.cu, size, **sizes)
        self.x = self.x._replace(**turned)

    def forward(self, y: Tensor, final: Tensor) -> None:
        p, span = self.p, self.span()
        self.turn()
        states = self.scratch(self.slots(span), p.N, p.D)
        if span < p.T:
            logs, ends = self.scratch(self.slots(span), p.D), self.scratch(*states.shape)
            self.launch(kernels.scan_sums, span, ChunkSums(logs, ends, None))
            self.carry(span, logs, self.x.rate, ends, Carried(self.initial, states, None), N=p.N)
        if self.cu is not None or not p.T:
            # sequences without tokens keep their initial state
            final.zero_() if self.initial is None else final.copy_(self.initial)
        self.launch(kernels.scan_tokens, span, states, y, final, CARRIED=span < p.T)

    def backward(self, dy: Tensor, dfinal: Tensor | None) -> dict[str, Tensor]:
        self.turn()
        self.x = self.x._replace(dy=dy)
        p, x, span = self.p, self.x, SPAN if self.p.T > 1 else 1
        tiles, slots = self.slots(self.C), self.slots(span)
        ends, back, before, after = (self.scratch(tiles, p.N, p.D) for _ in range(4))
        logs, state, share = self.scratch(tiles, p.D), (p.S, p.D, p.N), (slots, p.N, p.D)
        tokens = self.like("u"), self.like("delta"), None if x.z is None else self.like("z")
        rate, B, C = (self.scratch(*share) if wanted else None for wanted in (True, p.fixed_B, p.fixed_C))
        rest = self.scratch(slots, p.D), self.scratch(slots, p.D), self.scratch(*state)
        out = kernels.Gradients(*tokens, rate, B, C, *rest)
        self.launch(kernels.scan_sums, self.C, ChunkSums(logs, ends, back))
        self.carry(self.C, logs, x.rate, ends, Carried(self.initial, before, None), N=p.N)
        self.carry(self.C, logs, x.rate, back, Carried(dfinal, after, out.initial), N=p.N, BACK=True)
        borders = Borders(before, after)
        self.launch(kernels.scan_backward, span, out, borders)
        # slots last, as in A
        sums = {n: x if x is None else x.sum(0, dtype=torch.float64).t() for n, x in zip("ABC", out[3:6], strict=True)}
        if not (p.fixed_B and p.fixed_C):
            sums["B"], sums["C"] = self.of_shared(borders, sums["B"], sums["C"])
        names = {"bias": "delta_bias", "initial": "initial_state"}
        return self.gradients({names.get(n, n): x for n, x in {**out._asdict(), **sums}.items()})

    def of_shared(self, borders: Borders, dB: Any, dC: Any) -> tuple[Tensor, Tensor]:
        """Gradients of B and C [blocks, B, T, G, N]; a gradient that is not None is returned unchanged."""
        p = self.p
        BN = min(LANES, power_of_two(p.N))
        BX, parts = LANES // BN, -(-p.N // BN)
        slots, wide = self.slots(self.C), p.D // p.G
        blocks = max(1, min(PARTS // (slots * parts * p.G) + 1, wide // LANES))
        share = blocks, p.B, p.T, p.G, p.N
        dB, dC = (self.scratch(*share) if x is None else x for x in (dB, dC))
        args = self.x, dB, dC, borders, self.size(self.C, p.G, blocks), self.config(BX=BX, BN=BN)
        self.line(diagonal_shared.scan_shared, slots * p.G * blocks * parts, *args)
        return dB, dC


class _Unit(ChannelLaunch):
    def __init__(self, problem: GatedUnit, arrays: Mapping[str, Any]) -> None:
        super().__init__(problem, arrays)
        x, r, i = (self.channels(name) for name in ("x", "r", "i"))
        self.x = gated.Unit(x, r, i, self.small("a_param"), self.cu, self.initial)

    def forward(self, y: Tensor, final: Tensor) -> None:
        p, span, states = self.p, self.span(), None
        if span < p.T:
            logs, ends, states = (self.scratch(self.slots(span), p.D) for _ in range(3))
            self.by_chunks(gated.unit_sums, span, self.x, None, ChunkSums(logs, ends, None))
            self.carry(span, logs, None, ends, Carried(self.initial, states, None), N=1)
        self.by_chunks(gated.unit, span, self.x, states, gated.Results(y, final))

    def backward(self, dy: Tensor, dfinal: Tensor | None) -> dict[str, Tensor]:
        p, span = self.p, self.C
        logs, ends, back, before, after, share = (self.scratch(self.slots(span), p.D) for _ in range(6))
        x, r, i = (self.like(name) for name in ("x", "r", "i"))
        out = gated.Gradients(x, r, i, share, self.scratch(p.S, p.D))
        self.by_chunks(gated.unit_sums, span, self.x, dy, ChunkSums(logs, ends, back))
        self.carry(span, logs, None, ends, Carried(self.initial, before, None), N=1)
        self.carry(span, logs, None, back, Carried(dfinal, after, out.initial), N=1, BACK=True)
        self.by_chunks(gated.unit_backward, span, self.x, dy, out, Borders(before, after))
        return self.gradients({"initial_state" if n == "initial" else n: x for n, x in out._asdict().items()})


class _Convolution(ChannelLaunch):
    def __init__(self, problem: Convolution, arrays: Mapping[str, Any]) -> None:
        super().__init__(problem, arrays)
        self.C = min(TOKENS, power_of_two(max(problem.T, 1)))
        self.x = convolution.Convolved(
            self.channels("x"), self.small("weight"), self.small("bias"), self.cu, self.initial
        )
        BD, BK = min(CHANNELS, power_of_two(problem.D)), power_of_two(problem.K - 1)
        self.config = convolution.Config(problem.K, bool(problem.activation), self.C, BD, BK)

    def launch(self, kernel: Any, over: int, *args: Any) -> None:
        """Launch a kernel over tiles or sequences, and blocks of channels."""
        programs = over * -(-self.p.D // self.config.BD)
        self.launches.run(kernel, (programs,), self.x, *args, self.size(self.C), self.config, num_warps=4)

    def forward(self, y: Tensor, final: Tensor) -> None:
        p = self.p
        self.launch(convolution.convolve, self.slots(self.C), y)
        if p.K > 1:
            self.launch(convolution.last_inputs, p.S, final)

    def backward(self, dy: Tensor, dfinal: Tensor | None) -> dict[str, Tensor]:
        p, x, slots = self.p, self.x, self.slots(self.C)
        dp, dweight = self.scratch(p.B, p.T, p.D), self.scratch(slots, p.D, p.K)
        dbias = None if x.bias is None else self.scratch(slots, p.D)
        self.launch(convolution.through_activation, slots, dy, convolution.Gradients(dp, dweight, dbias))
        dx, dinitial, dfinal = self.like("x"), self.scratch(*p.state), dfinal if p.K > 1 else None
        self.launch(convolution.of_inputs, slots, dp, dfinal, dx)
        if p.K > 1 and x.initial is not None:
            self.launch(convolution.of_initial, p.S, dp, dfinal, dinitial)
        return self.gradients({"x": dx, "weight": dweight, "bias": dbias, "initial_state": dinitial})


# the class of each kind of problem; `forward` launches the kernels of both outputs, `backward` those of all gradients
_CALLS: dict[type[Any], Any] = {Scan: _Scan, GatedUnit: _Unit, Convolution: _Convolution}


def _call(p: Diagonal, arrays: Mapping[str, Any]) -> _Scan | _Unit | _Convolution:
    return _CALLS[type(p)](p, arrays)


def _shared(x: Tensor) -> Shared:
    # strides of B or C, whose shape is [N], [D, N], [B, T, N] or [B, T, G, N]
    strides = x.stride()
    if x.ndim < 3:
        return Shared(x, 0, 0, 0, strides[0] if x.ndim == 2 else 0)
    if x.ndim == 3:
        return Shared(x, strides[0], strides[1], 0, 0)
    return Shared(x, strides[0], strides[1], strides[2], 0, far_apart(x))
