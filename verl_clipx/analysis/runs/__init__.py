"""What runs left: their logs, records, validations and traces, read in one way. Knows files, and no trainer."""
