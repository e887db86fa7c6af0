"""Strategy log: compressed differentials, every step durable."""
