"""What lies in memory files that outlive the trainer."""
