"""LowDiff+'s replica process, its file and its handle in the trainer."""
