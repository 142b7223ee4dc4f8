"""verl's own trainer in one process, without Ray, for the runs of small policies that are measured on a CPU."""
