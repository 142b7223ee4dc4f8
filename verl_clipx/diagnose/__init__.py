"""What went wrong in a run, by one table of rules on its log, and the sentences that say so."""
