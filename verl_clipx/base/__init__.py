"""What methods are made of: tokens, parameters, declared metrics, the Method class."""
