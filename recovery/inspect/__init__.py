"""Looking at a run: inspect, verify, timeline, export, branch."""
