"""PPO: several optimizer steps in one loop body, as many as the KL divergence allows.

python examples/ppo.py runs/ppo        # kill it and start it again: it resumes bit for bit
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical

import lowdiff

ENVIRONMENTS, HORIZON, EPOCHS, MINIBATCH = 8, 64, 4, 128


class CartPole:
    """Balances poles on carts, all at once; its state is part of every step of the run."""

    def __init__(self) -> None:
        self.poles = torch.rand(ENVIRONMENTS, 4) * 0.1 - 0.05

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart; return rewards, and which poles fell (these begin anew), both ``[n]``."""
        _, speed, angle, spin = self.poles.unbind(1)
        push = (actions * 20.0 - 10.0 + 0.05 * spin.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (
            0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1)
        )
        pull = push - 0.05 * turn * angle.cos() / 1.1
        change = torch.stack([speed, pull, spin, turn], dim=1)
        self.poles = self.poles + 0.02 * change
        fell = (self.poles[:, 0].abs() > 2.4) | (self.poles[:, 2].abs() > 12 * math.pi / 180)
        fresh = torch.rand(ENVIRONMENTS, 4) * 0.1 - 0.05
        self.poles = torch.where(fell[:, None], fresh, self.poles)
        return torch.ones(ENVIRONMENTS) - fell.float(), fell

    def state_dict(self) -> dict[str, Any]:
        """Return the state that lowdiff saves."""
        return {"poles": self.poles}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state that lowdiff restores."""
        self.poles = state_dict["poles"]


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train or resume; return the last loss of every iteration of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=300, help="iterations")
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    world = CartPole()
    actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    agent = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    losses = {}

    with lowdiff.Checkpointer(
        args.run, optimizer_steps="any", snapshot_every=10, staging=args.staging
    ) as checkpointer:
        print(f"starting at step {checkpointer.attach(agent, optimizer, world=world)}", flush=True)
        for iteration in checkpointer.steps(until=args.steps):
            seen, chosen, gained = [], [], []
            with torch.no_grad():
                for _ in range(HORIZON):
                    seen.append(world.poles)
                    chosen.append(Categorical(logits=actor(world.poles)).sample())
                    gained.append(world.step(chosen[-1]))
                # Generalised advantages, computed from the last step backwards.
                values = critic(torch.stack([*seen, world.poles])).squeeze(-1)
                advantage = torch.zeros(ENVIRONMENTS)
                advantages: list[torch.Tensor] = []
                for t in reversed(range(HORIZON)):
                    reward, fell = gained[t]
                    error = reward + 0.99 * values[t + 1] * ~fell - values[t]
                    advantage = error + 0.99 * 0.95 * advantage * ~fell
                    advantages.insert(0, advantage)
                inputs, actions = torch.cat(seen), torch.cat(chosen)
                gains = torch.cat(advantages)
                targets = gains + values[:-1].flatten()
                old = Categorical(logits=actor(inputs)).log_prob(actions)
            num_steps = 0
            for _ in range(EPOCHS):
                for rows in torch.randperm(len(inputs)).split(MINIBATCH):
                    now = Categorical(logits=actor(inputs[rows]))
                    ratio = (now.log_prob(actions[rows]) - old[rows]).exp()
                    gain = (gains[rows] - gains[rows].mean()) / (gains[rows].std() + 1e-8)
                    policy = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                    value = (critic(inputs[rows]).squeeze(-1) - targets[rows]).square().mean()
                    loss = value - policy - 0.01 * now.entropy().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    checkpointer.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()  # staged; committed with the others when the body ends
                    num_steps += 1
                divergence = (ratio - 1 - ratio.log()).mean().item()
                if divergence > 0.003:
                    break
            losses[iteration + 1] = loss.item()
            text = f"{num_steps} updates, step {iteration + 1}: loss {loss.item():.9g}"
            print(text, flush=True)
    return losses


if __name__ == "__main__":
    main()
