"""Files, memory files and processes, as the other rooms use them."""
