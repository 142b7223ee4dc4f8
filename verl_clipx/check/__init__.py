"""What a user checks before a run: a loss of their own by the contract of methods, and the installation."""
