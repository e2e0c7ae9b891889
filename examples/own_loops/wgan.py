"""Wasserstein GAN with gradient penalty: two models, two optimizers, a second derivative.

shoal run -n 2 -s ddp examples/own_loops/wgan.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

NOISE = 8
CRITIC_STEPS = 2


def train(job: shoal.Job) -> None:
    generator = mlp(NOISE, 2)
    critic = mlp(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, generator_optimizer = job.setup(generator, generator_optimizer)
    critic, critic_optimizer = job.setup(critic, critic_optimizer)

    def noise() -> Tensor:  # this worker's rows of the noise for the global batch
        return job.rows(lambda n: torch.randn(n, NOISE))

    for real, _ in job.batches(ring(), batch_size=64, epochs=4):
        for _ in range(CRITIC_STEPS):
            fake = generator(noise()).detach()
            distance = critic(fake).mean() - critic(real).mean()
            loss = distance + 10 * gradient_penalty(critic, real, fake, job)
            critic_optimizer.zero_grad()
            job.backward(loss)
            critic_optimizer.step()

        critic.requires_grad_(False)
        generator_optimizer.zero_grad()
        job.backward(-critic(generator(noise())).mean())
        generator_optimizer.step()
        critic.requires_grad_(True)
        job.log(distance=job.mean(distance))


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, job: shoal.Job) -> Tensor:
    share = job.rows(lambda n: torch.rand(n, 1))
    between = torch.lerp(real, fake, share).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty: Tensor = (slope.norm(dim=1) - 1).square().mean()
    return penalty


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs)
    )


def ring() -> TensorDataset:
    """Points on a circle; the second tensor is not used."""
    angle = torch.linspace(0, 2 * torch.pi, 500)
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    return TensorDataset(points, angle)


if __name__ == "__main__":
    shoal.run(train)
