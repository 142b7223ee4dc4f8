"""A rollout server for the CPU: sampling, continuous batching, and verl's replica, server and adapter around them."""
