"""cbengine beside other engines, on the same machine and the same workloads: `python -m benchmarks.peers --help`.

Each engine is a program of its own (`run_*.py`), run in the engine's own virtual environment, that takes workloads from its
standard input (`protocol.py`). `rounds.py` runs them in turns and measures them from outside, `report.py` makes tables and
plots.
"""
