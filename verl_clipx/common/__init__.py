"""What the rooms beside each other share."""
