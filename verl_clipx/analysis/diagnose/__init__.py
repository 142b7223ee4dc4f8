"""What went wrong in a run, by one table of rules."""
