"""What the folders beside each other share: files, messages, secrets, traces' schema, statistics."""
