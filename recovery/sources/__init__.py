"""What each strategy holds of a rank in memory, and the chooser of the newest step that all ranks reach."""
