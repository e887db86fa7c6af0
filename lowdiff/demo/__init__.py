"""The main job, end to end: train, kill every worker, resume, compare bit for bit.

``train.py`` is the training script and the example to copy; the rest starts it under torchrun,
kills it, and reports. ``run`` and ``report`` do not import torch.
"""
