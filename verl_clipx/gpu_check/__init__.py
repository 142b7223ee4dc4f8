"""`clipx gpu-check`: does an update on these GPUs give what it should under verl's options?"""
