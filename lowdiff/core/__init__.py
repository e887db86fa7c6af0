"""What every room stands on: layout, checksums, number modes, log lines."""
