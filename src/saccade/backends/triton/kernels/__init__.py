"""The portable kernels, in Triton: forward, backward by owners, split decode, for every mask and every option."""
