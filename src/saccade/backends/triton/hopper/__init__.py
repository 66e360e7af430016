"""Kernels for Hopper, in Gluon: TMA, warpgroup products, a warp that copies beside warps that multiply."""
