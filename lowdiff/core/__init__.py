"""The ground of every room: layout, checksums, number modes, log lines."""
