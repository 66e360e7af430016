"""Recurrences over diagonal states on NVIDIA: lays out the arrays and launches their kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ...recurrent.diagonal import Convolution, Diagonal, GatedUnit, Scan
from .chip import on
from .kernels import convolution, gated
from .kernels import diagonal as kernels
from .kernels.diagonal import Channels, Shared, Sizes
from .recurrent import misplaced
from .recurrent_call import borders

TAKES_TENSORS = True
LARGEST = 256
# tokens whose loads stand together; numbers of state of a warp, forward and backward; a tile of a convolution
AHEAD, FORWARD, BACKWARD = 4, 128, 512
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
    spec, state = problem.outputs
    y = call.first.new_empty(spec.shape, dtype=getattr(torch, spec.dtype))
    final = call.first.new_empty(state.shape, dtype=torch.float32)
    if problem.S:
        with on(call.first):
            call.forward(y, final)
    return y, final


def backward(
    problem: Diagonal, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients by name of all arrays given, in their dtypes."""
    call = _call(problem, arrays)
    dy, dfinal = cotangents
    y, state = problem.outputs
    dy = call.first.new_zeros(y.shape) if dy is None else dy.contiguous()
    dfinal = call.first.new_zeros(state.shape, dtype=torch.float32) if dfinal is None else dfinal.contiguous()
    if not problem.S:
        return {n: torch.zeros_like(x) for n, x in arrays.items() if x is not None and n != "cu_seqlens"}
    with on(call.first):
        return call.backward(dy, dfinal)


class Call:
    """What the launches of one call share."""

    def __init__(self, problem: Any, arrays: Mapping[str, Any], chunk: int) -> None:
        p = self.p = problem
        self.arrays, self.C = arrays, max(1, min(chunk, p.T))
        self.first: Tensor = next(iter(arrays.values()))
        self.cu = borders(arrays["cu_seqlens"], p.T, self.first.device)
        initial = arrays["initial_state"]
        self.initial = None if initial is None else initial.contiguous()
        self.chunks = -(-p.T // self.C)
        self.slots = p.B * self.chunks if self.cu is None else p.T // self.C + p.S

    def size(self, groups: int = 1, blocks: int = 1) -> Sizes:
        """What kernels know of the sizes."""
        p = self.p
        return Sizes(p.S, p.T, p.D, groups, self.chunks, blocks, p.B * p.T)

    def channels(self, name: str) -> Any:
        """An array [B, T, D], or None."""
        x = self.arrays[name]
        return None if x is None else Channels(x, *x.stride()[:2])

    def small(self, name: str) -> Any:
        """A parameter in float32, or None."""
        x = self.arrays[name]
        return None if x is None else x.float().contiguous()

    def scratch(self, *shape: int) -> Tensor:
        """Numbers in float32."""
        return self.first.new_empty(shape, dtype=torch.float32)

    def like(self, name: str) -> Tensor:
        """A contiguous gradient of one of the arrays of tokens."""
        x = self.arrays[name]
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def found(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Shares added up, those of arrays that are there, in their dtypes."""
        kept: dict[str, Tensor] = {}
        for name, x in gradients.items():
            given = self.arrays[name]
            if x is None or given is None:
                continue
            while x.ndim > given.ndim and x.numel() != given.numel():
                x = x.sum(0, dtype=torch.float64)
            kept[name] = x.reshape(given.shape).to(given.dtype)
        return kept


class _Scan(Call):
    def __init__(self, problem: Scan, arrays: Mapping[str, Any]) -> None:
        super().__init__(problem, arrays, problem.chunk)
        p = problem
        self.x = kernels.Scan(
            self.channels("u"), self.channels("delta"), self.channels("z"), arrays["A"].contiguous(),
            _shared(arrays["B"]), _shared(arrays["C"]), self.small("D"), self.small("delta_bias"), self.cu,
            self.initial,
        )  # fmt: skip
        self.BN = _power(p.N)
        self.wide = p.D // p.G

    def grid(self, numbers: int) -> tuple[int, int, Sizes]:
        """(channels of a program, programs, sizes) where a warp holds so many numbers of state."""
        p = self.p
        BD = max(1, min(32, _power(self.wide), numbers // self.BN))
        blocks = -(-self.wide // BD)
        return BD, p.S * p.G * blocks, self.size(p.G, blocks)

    def launch(self, kernel: Any, numbers: int, *args: Any, **constants: Any) -> None:
        """Launch a kernel over sequences, groups and blocks of channels."""
        BD, programs, size = self.grid(numbers)
        kernel[(programs,)](
            self.x, *args, size, N=self.p.N, SOFTPLUS=self.p.delta_softplus, BD=BD, BN=self.BN, num_warps=1, **constants
        )

    def forward(self, y: Tensor, final: Tensor) -> None:
        self.launch(kernels.scan, FORWARD, y, final, AHEAD=AHEAD)

    def backward(self, dy: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
        p = self.p
        kept = self.scratch(self.slots, p.D, p.N)
        self.launch(kernels.walk, FORWARD, kept, C=self.C)
        blocks = self.grid(BACKWARD)[2].blocks
        state, share = (p.S, p.D, p.N), (blocks, p.B, p.T, p.G, p.N)
        out = kernels.Gradients(
            self.like("u"), self.like("delta"), None if self.x.z is None else self.like("z"), self.scratch(*state),
            self.scratch(*(state if p.fixed_B else share)), self.scratch(*(state if p.fixed_C else share)),
            self.scratch(p.S, p.D), self.scratch(p.S, p.D), self.scratch(*state),
        )  # fmt: skip
        scratch = self.scratch(p.S, self.C, p.D, p.N)
        self.launch(
            kernels.scan_backward, BACKWARD, dy, dfinal, out, kept, scratch, FIXED_B=p.fixed_B, FIXED_C=p.fixed_C,
            C=self.C,
        )  # fmt: skip
        names = {"bias": "delta_bias", "initial": "initial_state"}
        return self.found({names.get(n, n): x for n, x in out._asdict().items()})


class _Unit(Call):
    def __init__(self, problem: GatedUnit, arrays: Mapping[str, Any]) -> None:
        super().__init__(problem, arrays, problem.chunk)
        x, r, i = (self.channels(name) for name in ("x", "r", "i"))
        self.x = gated.Unit(x, r, i, self.small("a_param"), self.cu, self.initial)
        self.BD = min(32, _power(problem.D))

    def launch(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Launch a kernel over sequences and blocks of channels."""
        programs = self.p.S * -(-self.p.D // self.BD)
        kernel[(programs,)](self.x, *args, self.size(), BD=self.BD, C=self.C, num_warps=1, **constants)

    def forward(self, y: Tensor, final: Tensor) -> None:
        self.launch(gated.unit, y, final, None, AHEAD=AHEAD)

    def backward(self, dy: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
        p = self.p
        kept = self.scratch(self.slots, p.D)
        self.launch(gated.unit, None, None, kept, AHEAD=1)
        x, r, i = (self.like(name) for name in ("x", "r", "i"))
        out = gated.Gradients(x, r, i, self.scratch(p.S, p.D), self.scratch(p.S, p.D))
        self.launch(gated.unit_backward, dy, dfinal, out, kept, self.scratch(p.S, self.C, p.D))
        return self.found({"initial_state" if n == "initial" else n: x for n, x in out._asdict().items()})


class _Convolution(Call):
    def __init__(self, problem: Convolution, arrays: Mapping[str, Any]) -> None:
        super().__init__(problem, arrays, TOKENS)
        self.C = min(TOKENS, _power(max(problem.T, 1)))
        self.chunks = -(-problem.T // self.C)
        self.slots = problem.B * self.chunks if self.cu is None else problem.T // self.C + problem.S
        self.x = convolution.Convolved(
            self.channels("x"), self.small("weight"), self.small("bias"), self.cu, self.initial
        )
        self.BD = min(CHANNELS, _power(problem.D))

    def launch(self, kernel: Any, over: int, *args: Any, **constants: Any) -> None:
        """Launch a kernel over tiles or sequences, and blocks of channels."""
        programs = over * -(-self.p.D // self.BD)
        if programs:
            kernel[(programs,)](self.x, *args, self.size(), K=self.p.K, BD=self.BD, num_warps=4, **constants)

    def forward(self, y: Tensor, final: Tensor) -> None:
        p = self.p
        self.launch(convolution.convolve, self.slots, y, SILU=bool(p.activation), C=self.C)
        if p.K > 1:
            self.launch(convolution.last_inputs, p.S, final, BK=_power(p.K - 1))

    def backward(self, dy: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
        p, x = self.p, self.x
        dp, dweight = self.scratch(p.B, p.T, p.D), self.scratch(self.slots, p.D, p.K)
        dbias = None if x.bias is None else self.scratch(self.slots, p.D)
        activation = {"SILU": bool(p.activation), "C": self.C}
        self.launch(convolution.through_activation, self.slots, dy, dp, dweight, dbias, **activation)
        dx, dinitial, kept = self.like("x"), self.scratch(*p.state), dfinal if p.K > 1 else None
        self.launch(convolution.of_inputs, self.slots, dp, kept, dx, C=self.C)
        if p.K > 1 and x.initial is not None:
            self.launch(convolution.of_initial, p.S, dp, kept, dinitial, BK=_power(p.K - 1))
        return self.found({"x": dx, "weight": dweight, "bias": dbias, "initial_state": dinitial})


# each launches what computes both outputs by `forward`, and all gradients by `backward`
_CALLS: dict[type[Any], Any] = {Scan: _Scan, GatedUnit: _Unit, Convolution: _Convolution}


def _call(p: Diagonal, arrays: Mapping[str, Any]) -> _Scan | _Unit | _Convolution:
    return _CALLS[type(p)](p, arrays)


def _shared(x: Tensor) -> Shared:
    # B or C by the number of their dimensions: [N], [D, N], [B, T, N], [B, T, G, N]
    strides = x.stride()
    if x.ndim < 3:
        return Shared(x, 0, 0, 0, strides[0] if x.ndim == 2 else 0)
    return Shared(x, strides[0], strides[1], strides[2] if x.ndim == 4 else 0, 0)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
