"""What went wrong in a run, by one table of rules; whether arms may be compared; which change prevents a failure."""
