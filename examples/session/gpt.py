"""The loop of ``gpt_alone.py`` with DiLoCo: ``muster launch --local 2 -- examples/session/gpt.py``."""

import argparse
import math

import torch
from small_gpt import SmallGPT, read_text

import muster

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", default="ckpt.pt")
arguments = parser.parse_args()
max_iters, eval_interval, passes, batch_size, block_size = arguments.steps, 50, 2, 8, 64
learning_rate, warmup_iters, min_lr, beta2, grad_clip = 3e-3, 20, 3e-4, 0.99, 1.0
session = muster.session("diloco", sync_interval=20, max_steps=max_iters, max_grad_norm=grad_clip)
device = session.device
torch.manual_seed(1337 + session.process_index)
train_data, val_data = read_text()


def get_batch(data):
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([data[start : start + block_size] for start in starts])
    y = torch.stack([data[start + 1 : start + 1 + block_size] for start in starts])
    return x.to(device), y.to(device)


def get_lr(iteration):
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / warmup_iters
    share = (iteration - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, share))) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch(val_data))[1].item() for _ in range(5)]
    model.train()
    return sum(losses) / len(losses)


model = SmallGPT(context=block_size).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, beta2))
model, optimizer = session.prepare(model, optimizer)
iter_num = session.completed_steps
while iter_num < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
    for _ in range(passes):
        logits, loss = model(*get_batch(train_data))
        session.backward(loss / passes)
    session.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
print(f"step {iter_num}: val loss {estimate_loss():.4f}")
torch.save(model.state_dict(), arguments.out)
