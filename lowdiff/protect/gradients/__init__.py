"""Strategy gradients: consumed gradients and two images stay in memory, and steps are replayed."""
