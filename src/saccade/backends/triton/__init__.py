"""Kernels in Triton and Gluon."""
