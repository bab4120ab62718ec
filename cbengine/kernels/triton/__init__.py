"""Kernels for GPUs in Triton, each beside a plain torch reference. Importing a module of this package needs triton."""
