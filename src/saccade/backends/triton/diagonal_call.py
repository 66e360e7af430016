"""What the launches of one recurrence over channels share: arguments of kernels, chunks, and carries of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...operands import Spec
from .kernels import diagonal_chunks
from .kernels.diagonal import Channels, Sizes
from .launches import PLAIN, Launches
from .recurrent_call import borders, power_of_two

# tokens per tile and channels per program; the least number of tokens in a forward's chunk; programs that fill a chip
TILE, LANES, SPAN, PROGRAMS = 16, 32, 128, 2048


class ChannelLaunch:
    """The base of the launches of one call."""

    # what the kernels read, a named tuple of arrays in their layout
    x: Any

    def __init__(self, problem: Any, arrays: Mapping[str, Any]) -> None:
        p = self.p = problem
        self.launches: Launches = PLAIN
        self.arrays, self.C = arrays, TILE if p.T > 1 else 1
        self.first: Tensor = next(iter(arrays.values()))
        self.cu = borders(arrays["cu_seqlens"], p.T, self.first.device)
        initial = arrays["initial_state"]
        self.initial = None if initial is None else initial.contiguous()

    def chunks(self, span: int) -> int:
        """Chunks per sequence, if sequences are not packed."""
        return max(1, -(-self.p.T // span))

    def slots(self, span: int) -> int:
        """The number of slots for the chunks of all sequences."""
        return self.p.B * self.chunks(span) if self.cu is None else self.p.T // span + self.p.S

    def size(self, span: int, groups: int = 1, blocks: int = 1) -> Sizes:
        """The sizes that kernels take."""
        p = self.p
        return Sizes(p.S, p.T, p.D, groups, self.chunks(span), blocks, p.B * p.T)

    def span(self) -> int:
        """Tokens per chunk of a forward, a multiple of a tile's, chosen so that all processors have work."""
        p = self.p
        if p.T <= 1:
            return 1
        most = p.B * p.T * -(-p.D // LANES) // PROGRAMS
        return max(SPAN, 1 << max(most.bit_length() - 1, 0))

    def line(self, kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        """Launch a 1-d grid of programs of one warp. A lane reads only those results that it wrote itself."""
        self.launches.run(kernel, (programs,), *args, **constants, num_warps=1, num_stages=1)

    def by_chunks(self, kernel: Any, span: int, *args: Any) -> None:
        """Launch a kernel whose programs own a chunk and LANES channels each."""
        known = {"BD": LANES, "C": self.C, "SPAN": span}
        constants = {name: x for name, x in known.items() if name in kernel.arg_names}
        self.line(kernel, self.slots(span) * -(-self.p.D // LANES), *args, self.size(span), **constants)

    def carry(self, span: int, *args: Any, N: int, BACK: bool = False) -> None:
        """Launch the kernel that carries states from chunk to chunk."""
        programs, rows = self.p.S * N * -(-self.p.D // LANES), min(TILE, power_of_two(self.chunks(span)))
        config = diagonal_chunks.CarryConfig(N, BACK, LANES, rows, span)
        self.line(diagonal_chunks.carry, programs, *args, self.cu, self.size(span), config)

    def channels(self, name: str) -> Any:
        """An array [B, T, D] as kernels take it, or None."""
        x = self.arrays[name]
        return None if x is None else Channels(x, *x.stride()[:2])

    def small(self, name: str) -> Any:
        """A parameter as a float32 tensor, or None."""
        x = self.arrays[name]
        return None if x is None else x.float().contiguous()

    def scratch(self, *shape: int) -> Tensor:
        """An uninitialised float32 tensor."""
        return self.launches.scratch(*shape, like=self.first)

    def result(self, spec: Spec) -> Tensor:
        """An uninitialised tensor for an output."""
        return self.launches.scratch(*spec.shape, like=self.first, dtype=getattr(torch, spec.dtype))

    def like(self, name: str) -> Tensor:
        """An uninitialised contiguous gradient of an array of tokens."""
        x = self.arrays[name]
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def gradients(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The partial gradients of the call's arrays, added up, in the dtypes of the arrays."""
        sums: dict[str, Tensor] = {}
        for name, x in gradients.items():
            array = self.arrays[name]
            if x is None or array is None:
                continue
            while x.ndim > array.ndim and x.numel() != array.numel():
                x = x.sum(0, dtype=torch.float64)
            sums[name] = x.reshape(array.shape).to(array.dtype)
        return sums
