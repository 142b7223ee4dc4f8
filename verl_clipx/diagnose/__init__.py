"""What went wrong in a run, by one table of rules on its log, and whether two arms of runs may be compared."""
