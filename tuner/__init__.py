"""How often to snapshot: plain measurements in, plain decisions out."""
