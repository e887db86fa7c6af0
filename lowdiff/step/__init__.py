"""The inside of a step: DDP's hook, the optimizers' hooks, loss scale and residual."""
