"""How bytes lie in records, segments, images and documents."""
