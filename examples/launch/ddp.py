"""Plain ``DistributedDataParallel``, as in PyTorch's tutorial: it knows nothing of Muster.

python3 cli_typer.py launch --local 2 -- examples/launch/ddp.py --steps 50
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(0)
    points = torch.rand(512, 2)
    samples = TensorDataset(points, (points.sum(dim=1) > 1).long())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = DataLoader(samples, batch_size=16, sampler=DistributedSampler(samples))
    step = 0
    while step < arguments.steps:
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == arguments.steps:
                break
    dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()} with {dist.get_world_size()} ranks: loss {loss.item():.6f}")
        if arguments.out:
            torch.save(model.module.state_dict(), arguments.out)
    del model  # it holds the group: gloo's may wait for ever if it ends with the model, which keeps Python's lock
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
