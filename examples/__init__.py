"""Complete training scripts to copy. Each runs as a file; ``lowdiff demo`` launches ``ddp_gpt``."""
