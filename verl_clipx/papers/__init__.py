"""The papers' experiments: their tasks, evaluation and tables. Nothing outside this folder imports it."""
