"""verl's own trainer in one process, without Ray: the runs that rank methods on a CPU."""
