"""A GAN whose two optimizers share a session: ``muster launch --local 2 -- examples/session/gan.py``.

The generator learns to make points of a circle from noise.
"""

import argparse

import torch
from torch import nn

import muster

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
arguments = parser.parse_args()


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


session = muster.session("diloco", sync_interval=10, max_steps=arguments.steps)
torch.manual_seed(session.process_index)  # data are made on the fly: others on each process
generator, discriminator = network(2, 2), network(2, 1)
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-3)
session.prepare(generator, discriminator, of_generator, of_discriminator)
score = nn.functional.binary_cross_entropy_with_logits
ones, zeros = torch.ones(64, 1, device=session.device), torch.zeros(64, 1, device=session.device)

while session.completed_steps < arguments.steps:
    angles = torch.rand(64, device=session.device) * 2 * torch.pi
    points, noise = torch.stack([angles.cos(), angles.sin()], 1), torch.randn(64, 2, device=session.device)

    of_discriminator.zero_grad()
    session.backward(score(discriminator(points), ones) + score(discriminator(generator(noise).detach()), zeros))
    session.step(of_discriminator)

    of_generator.zero_grad()
    session.backward(score(discriminator(generator(noise)), ones))
    session.step(of_generator)

radius = generator(torch.randn(512, 2, device=session.device)).norm(dim=1).mean()
print(f"mean radius {radius:.3f}, of the circle 1")
