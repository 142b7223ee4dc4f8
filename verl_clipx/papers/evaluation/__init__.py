"""Measures a checkpoint's accuracy: sampling, avg@k, pass@k, maj@k, confidence intervals and paired comparisons.

Benchmarks are Parquet files in verl's schema; rewards are functions that the user names. Nothing here knows a task.
"""
