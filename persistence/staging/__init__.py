"""Memory files that outlive the trainer: log, snapshot image, residual slots, status pages."""
