"""Estimates what a run takes: memory per GPU in each phase, tokens, optimizer steps, and roughly how long.

The memory of a phase is a sum of named parts that follow from the model's shape and the configuration. Everything else
is an assumption, a named number printed with every result. verl is assumed to run FSDP with a colocated vLLM.
"""
