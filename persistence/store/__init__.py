"""Copy of a run in an object store."""
