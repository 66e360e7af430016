"""What the launches of one recurrence over channels share: its arrays as kernels take them, chunks, and carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .kernels import diagonal_chunks
from .kernels.diagonal import Channels, Sizes
from .recurrent_call import borders, power_of_two

# tokens of a tile and channels of a program; the fewest tokens of a forward's chunk, and programs that fill a chip
TILE, LANES, SPAN, PROGRAMS = 16, 32, 128, 2048


class ChannelLaunch:
    """What the launches of one call share."""

    def __init__(self, problem: Any, arrays: Mapping[str, Any]) -> None:
        p = self.p = problem
        self.arrays, self.C = arrays, TILE if p.T > 1 else 1
        self.first: Tensor = next(iter(arrays.values()))
        self.cu = borders(arrays["cu_seqlens"], p.T, self.first.device)
        initial = arrays["initial_state"]
        self.initial = None if initial is None else initial.contiguous()

    def chunks(self, span: int) -> int:
        """Chunks of a sequence where none are packed."""
        return max(1, -(-self.p.T // span))

    def slots(self, span: int) -> int:
        """Slots of all chunks."""
        return self.p.B * self.chunks(span) if self.cu is None else self.p.T // span + self.p.S

    def size(self, span: int, groups: int = 1, blocks: int = 1) -> Sizes:
        """What kernels know of the sizes."""
        p = self.p
        return Sizes(p.S, p.T, p.D, groups, self.chunks(span), blocks, p.B * p.T)

    def span(self) -> int:
        """Tokens of a forward's chunk, a multiple of a tile's: as many as leave work for all processors."""
        p = self.p
        if p.T <= 1:
            return 1
        most = p.B * p.T * -(-p.D // LANES) // PROGRAMS
        return max(SPAN, 1 << max(most.bit_length() - 1, 0))

    def line(self, kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        """Launch a kernel over a line of programs of one warp, whose lanes own what they write and read again."""
        kernel[(programs,)](*args, **constants, num_warps=1, num_stages=1)

    def by_chunks(self, kernel: Any, span: int, *args: Any) -> None:
        """Launch a kernel whose programs own chunks and LANES channels."""
        known = {"BD": LANES, "C": self.C, "SPAN": span}
        constants = {name: x for name, x in known.items() if name in kernel.arg_names}
        self.line(kernel, self.slots(span) * -(-self.p.D // LANES), *args, self.size(span), **constants)

    def carry(self, span: int, *args: Any, N: int, BACK: bool = False) -> None:
        """Launch what takes a state from chunk to chunk."""
        programs, rows = self.p.S * N * -(-self.p.D // LANES), min(TILE, power_of_two(self.chunks(span)))
        config = diagonal_chunks.CarryConfig(N, BACK, LANES, rows, span)
        self.line(diagonal_chunks.carry, programs, *args, self.cu, self.size(span), config)

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

    def gradients(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Shares added up, those of arrays that are there, in their dtypes."""
        sums: dict[str, Tensor] = {}
        for name, x in gradients.items():
            array = self.arrays[name]
            if x is None or array is None:
                continue
            while x.ndim > array.ndim and x.numel() != array.numel():
                x = x.sum(0, dtype=torch.float64)
            sums[name] = x.reshape(array.shape).to(array.dtype)
        return sums
