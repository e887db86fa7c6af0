"""Strategy replica (LowDiff+): a process applies every step to a copy of the state in memory."""
