"""How a step is ended on all ranks together."""
