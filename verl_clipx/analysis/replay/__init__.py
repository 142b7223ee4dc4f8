"""What another method would do to the tokens that a run traced."""
