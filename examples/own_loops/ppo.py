"""Proximal policy optimization on a small control problem: two models, two losses, one optimizer.

Every worker plays all episodes alike, since they are cheap; the updates divide the samples.

shoal run -n 2 -s ddp examples/own_loops/ppo.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

EPISODES = 12
STEPS = 16
DEVIATION = 0.3  # of actions
CLIP = 0.2

Sample = tuple[list[Tensor], Tensor]  # [state, action, its log-probability], what was gained


def train(job: shoal.Job) -> None:
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    value = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    policy, value, optimizer = job.setup(policy, value, optimizer)
    for _ in range(5):
        samples, reward = play(policy, value)
        job.print(f"mean reward {reward:.3f}")
        for (state, action, chance), target in job.batches(samples, batch_size=48, epochs=2):
            advantage = target - value(state).squeeze(1).detach()
            ratio = (log_probability(policy(state), action) - chance).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            value_loss = F.mse_loss(value(state).squeeze(1), target)
            optimizer.zero_grad()
            job.backward(policy_loss)
            job.backward(0.5 * value_loss)
            job.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            job.log(policy=job.mean(policy_loss), value=job.mean(value_loss))


@torch.no_grad()
def play(policy: nn.Module, value: nn.Module) -> tuple[list[Sample], float]:
    """A point that is pushed towards 0: position and speed, and a reward for being near."""
    generator = torch.Generator().manual_seed(7)
    state = torch.randn(EPISODES, 2, generator=generator)
    states, actions, chances, rewards = [], [], [], []
    for _ in range(STEPS):
        mean = policy(state)
        action = mean + DEVIATION * torch.randn(EPISODES, 1, generator=generator)
        states.append(state)
        actions.append(action)
        chances.append(log_probability(mean, action))
        speed = state[:, 1:] + 0.1 * action
        state = torch.cat([state[:, :1] + 0.1 * speed, speed], dim=1)
        rewards.append(-state[:, 0].square())
    gained = value(state).squeeze(1)
    targets: list[Tensor] = []
    for reward in reversed(rewards):
        gained = reward + 0.95 * gained
        targets.insert(0, gained)
    columns = [torch.cat(column) for column in (states, actions, chances, targets)]
    samples = [(inputs, target) for *inputs, target in zip(*columns, strict=True)]
    return samples, float(torch.stack(rewards).mean())


def log_probability(mean: Tensor, action: Tensor) -> Tensor:
    """Of a normal distribution, up to a constant."""
    return -0.5 * ((action - mean) / DEVIATION).square().squeeze(1)


if __name__ == "__main__":
    shoal.run(train)
