"""What a run did: its log as a table, figures, a report. Reads files that verl writes; knows no trainer."""
