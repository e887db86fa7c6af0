"""Publishing the weights of a run, version by version: a follower of the run that writes into a target."""
