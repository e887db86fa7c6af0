"""The live training as lowdiff knows it: model, optimizers, objects, averages and ranks."""
