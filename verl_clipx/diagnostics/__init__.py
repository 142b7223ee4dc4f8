"""What runs did: their logs and traces, a page that compares them. Reads files that verl writes; knows no trainer."""
