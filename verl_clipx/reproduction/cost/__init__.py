"""What a run takes: memory per GPU in each phase, tokens, optimizer steps, and roughly how long.

The memory of a phase is a sum of named parts, each of which follows from the model's shape and the configuration; what
does not is an assumption, a named number that is printed with every result. verl is FSDP with a colocated vLLM here.
"""
