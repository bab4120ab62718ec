"""Kernels: nothing but arithmetic on tensors, each beside a plain torch reference (`reference.py`).

`cpu/` holds the C++ sources, `build.py` makes a shared library of them, `library.py` is its interface, and the other
files are what Python does with it. Nothing here knows engines, requests or transformers.
"""
