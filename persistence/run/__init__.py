"""A run's files, its history, and the owner of each step."""
