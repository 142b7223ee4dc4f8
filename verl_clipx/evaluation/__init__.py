"""A checkpoint's accuracy: samples, avg@k, pass@k, maj@k, intervals, paired comparisons.

Benchmarks are Parquet files in verl's schema and rewards are functions named by the user; no task is known here.
"""
