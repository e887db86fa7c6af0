"""Strategy survivors: after a failure the ranks that live save the state (just-in-time checkpoints)."""
