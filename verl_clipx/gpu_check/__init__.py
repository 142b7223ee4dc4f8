"""`clipx gpu-check`: on this machine's GPUs, does an update give what it should under each of verl's options?"""
