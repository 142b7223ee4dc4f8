"""The losses as functions of tensors: they need torch alone, and no verl."""
