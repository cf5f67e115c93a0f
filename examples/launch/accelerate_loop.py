"""A loop with Hugging Face Accelerate: it knows nothing of Muster.

python3 cli_typer.py launch --local 2 -- examples/launch/accelerate_loop.py --steps 20
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="trained")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    points = torch.rand(1024, 2)
    samples = TensorDataset(points, (points.sum(dim=1) > 1).long())
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=16, shuffle=True))
    for step, (x, y) in enumerate(batches, 1):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step == arguments.steps:
            break
    mean = accelerator.gather(loss.detach()).mean().item()
    accelerator.wait_for_everyone()
    accelerator.save_model(model, arguments.out)
    backend = torch.distributed.get_backend()
    accelerator.print(f"{backend} with {accelerator.num_processes} ranks: loss {mean:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
