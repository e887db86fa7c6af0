"""What lowdiff knows of the live training: model, optimizers, objects, averages and ranks."""
