"""Retention: decides what may be removed, and removes it."""
