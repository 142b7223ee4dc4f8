"""What runs did: their logs and traces, a page that compares them. Knows files that verl writes, and no trainer."""
