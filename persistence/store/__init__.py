"""A run's copy in an object store."""
