"""How far rounding may move a gradient. Readers of runs need it without torch."""

# Relative to a token's gradient, by the name of log_prob's dtype.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
