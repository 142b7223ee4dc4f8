"""What every method is made of: tokens, parameters, metrics as declared, and the Method class."""
