"""Bytes: record format, codecs, staging log, writer process, snapshots, stores and retention.

Knows no gradients. What the writer process imports from here never imports torch.
"""
