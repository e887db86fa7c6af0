"""Persistence: record format, codecs, staging log, writer process, snapshots, stores, retention.

This package knows no gradients. Modules that the writer process imports never import torch.
"""
