"""What every room stands on: layout, checksums, number modes, copies from devices, log lines."""
