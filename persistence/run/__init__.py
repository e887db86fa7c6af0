"""What exists of a run and who owns which step."""
