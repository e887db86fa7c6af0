"""LowDiff+'s replica process and recovery from its memory."""
