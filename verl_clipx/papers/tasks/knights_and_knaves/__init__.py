"""Knights and knaves: who tells the truth and who lies follows from what the people say about each other."""
