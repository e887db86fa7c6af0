"""Writer process: moves steps from the staging log to the run folder."""
