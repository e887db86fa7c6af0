"""The writer process: from the staging log to the run folder."""
