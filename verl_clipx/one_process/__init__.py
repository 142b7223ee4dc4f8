"""Runs verl's own trainer in one process, without Ray, for the runs that rank methods on a CPU."""
