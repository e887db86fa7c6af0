"""How an incarnation begins and ends."""
