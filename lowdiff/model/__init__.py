"""What lowdiff knows of the live model: what is in it, and who writes to it."""
