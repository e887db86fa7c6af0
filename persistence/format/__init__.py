"""Byte formats of records, segments, images and documents."""
