"""The buffers and steps of one call of a recurrence: arrays as float32, dispatches by template, one submit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import widened
from .device import Gpu
from .memory import Buffer
from .shapes import line
from .step import Step
from .tiled import text

Array = NDArray[Any]
# buffers by name, with the shapes of their content
Buffers = dict[str, tuple[Buffer, tuple[int, ...]]]


def padded(x: Array) -> Array:
    """x [..., n] as float32, with n padded by zeros to vectors of four."""
    n = x.shape[-1]
    result = np.zeros((*x.shape[:-1], -(-n // 4) * 4), np.float32)
    result[..., :n] = widened(x)
    return result


def slots(B: int, T: int, borders: Array | None, chunk: int) -> tuple[int, Array]:
    """The number of chunks of all sequences, and the words that describe them to kernels.

    The words are, for each chunk, the row [B T] of its first token, its number of tokens and its sequence; then for
    each sequence its first chunk, number of chunks, first row and number of tokens.
    """
    ends = [(n * T, (n + 1) * T) for n in range(B)] if borders is None else [*pairwise(borders.tolist())]
    chunks: list[tuple[int, ...]] = []
    sequences: list[tuple[int, ...]] = []
    for n, (begin, end) in enumerate(ends):
        sequences.append((len(chunks), -(-(end - begin) // chunk), begin, end - begin))
        chunks += [(t, min(chunk, end - t), n) for t in range(begin, end, chunk)]
    return len(chunks), np.array([x for words in (*chunks, *sequences) for x in words], np.uint32)


class Work:
    """The steps of one call and their buffers, which return to the device's pool at the end of the `with` block."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self.steps: list[Step] = []
        self.owned: list[Buffer] = []

    def upload(self, *arrays: Array) -> Buffer:
        """A buffer with the arrays, one after the other."""
        return self.keep(self.gpu.upload(np.concatenate([x.reshape(-1) for x in arrays])))

    def zeros(self, vectors: int) -> Buffer:
        """A buffer of zeros for `vectors` vectors of four float32."""
        return self.keep(self.gpu.buffer(16 * max(vectors, 1)))

    def keep(self, buffer: Buffer) -> Buffer:
        """Own this buffer, so that it returns to the pool at the end; returns it."""
        self.owned.append(buffer)
        return buffer

    def add(
        self, template: str, constants: dict[str, Any], bindings: Sequence[Buffer], groups: int, *numbers: int | float
    ) -> None:
        """Add a dispatch of `groups` workgroups, if there are any; numbers are its uniform block."""
        if groups:
            words = b"".join((np.float32 if isinstance(n, float) else np.uint32)(n).tobytes() for n in numbers)
            kernel = self.gpu.kernel(text(template, constants), template)
            self.steps.append(Step(kernel, [*bindings, self.gpu.uniform(words)], line(groups)))

    def fold(self, source: Buffer, parts: int, vectors: int, read_at: int = 0) -> Buffer:
        """A new buffer with the sum, in order, of `parts` parts of `vectors` vectors each."""
        sums = self.zeros(vectors)
        self.add("fold", {}, [source, sums], -(-vectors // 64), vectors, read_at, parts)
        return sums

    def finish(self, *reads: tuple[Buffer, tuple[int, ...]]) -> list[Array]:
        """Submit the steps; returns the content of these buffers as float32 arrays of these shapes."""
        return self.gpu.call(self.steps, [(buffer, np.float32, shape) for buffer, shape in reads])[0]

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self.owned:
            self.gpu.release(buffer)


def state_binding(work: Work, state: Array | None) -> list[Buffer]:
    """The binding of a state with padded rows; empty for None."""
    return [] if state is None or not state.size else [work.upload(padded(state))]
