"""A policy of about a million parameters, its tokenizer, and a supervised warm start on two CPU cores."""
