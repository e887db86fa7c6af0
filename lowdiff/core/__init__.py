"""Common ground of all rooms: layout, checksums, numeric modes, log lines."""
