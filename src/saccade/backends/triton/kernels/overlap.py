"""Kernels that start before the one before them in the stream has ended: programmatic launches, from Hopper on."""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

import triton


@triton.jit
def start(OVERLAP: tl.constexpr):
    """Let the next kernel start when all programs of this one have."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended: what it wrote may be read only now, and what it reads be written."""
    if OVERLAP:
        gdc_wait()
