"""What the day with a GPU answers: one command of a few minutes, in parts by priority."""
