"""What happens inside a step: DDP's hook, the optimizers' hooks, loss scale and residual."""
