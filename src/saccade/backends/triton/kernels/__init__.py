"""The portable kernels, in Triton, for every mask and every option: forward, backward by owners, split decode."""
