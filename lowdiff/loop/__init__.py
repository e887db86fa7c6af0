"""Everything around a step: the loop, the data, signals from the scheduler, pins."""
