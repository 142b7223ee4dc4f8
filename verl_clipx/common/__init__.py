"""What all folders share: files, messages, secrets, versions, statistics."""
