"""The mathematics of each method: pure functions on tensors, one method a file.

Every method is a gradient weight ``F(ratio, advantages)`` with ``dJ/dlog_prob = F * advantages`` per token
(DGPO, Eq. 1). Shapes are (sequences, length) throughout, and nothing here reads a mask: what lies outside the
response must be finite on the way in and is dropped by whoever aggregates.
"""
