"""The version of lowdiff, which fences name."""

__version__ = "0.1.0"
