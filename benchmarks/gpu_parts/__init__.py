"""What `benchmarks/gpu.py` is made of: the machine, the models, our engine, transformers' own, and the report."""
