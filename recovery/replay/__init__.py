"""Replaying differentials with the real torch optimizers."""
