"""A Lightning module and its ``Trainer``: they know nothing of Muster. It needs ``pytorch-lightning``.

python3 cli_typer.py launch --local 2 -- examples/launch/lightning_module.py --steps 20
"""

import argparse
import os

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Points(lightning.LightningModule):
    """Tells on which side of a line a point is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="trained.ckpt")
    arguments = parser.parse_args()
    lightning.seed_everything(0)
    points = torch.rand(1024, 2)
    batches = DataLoader(TensorDataset(points, (points.sum(dim=1) > 1).long()), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Points(), batches)
    trainer.save_checkpoint(arguments.out)
    if trainer.is_global_zero:
        backend = torch.distributed.get_backend()
        loss = trainer.callback_metrics["loss"].item()
        print(f"{backend} with {trainer.world_size} ranks: loss {loss:.6f}")


if __name__ == "__main__":
    main()
