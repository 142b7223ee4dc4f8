"""Controllers turn additive statistics of the tokens into clip bounds.

Additive means that the statistics are one flat float64 vector: the vectors of two sets of tokens, added, are the
vector of both together. Adding over micro-batches and all-reducing over data-parallel ranks is therefore exact.
"""
