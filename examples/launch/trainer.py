"""A ``transformers.Trainer`` on a small language model: it knows nothing of Muster.

python3 cli_typer.py launch --local 2 -- examples/launch/trainer.py --steps 10
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Counting(Dataset):
    """Rows of eight numbers that follow each other."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.arange(index, index + 8) % 64
        return {"input_ids": row, "labels": row}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="trained")
    arguments = parser.parse_args()
    options = TrainingArguments(
        output_dir=arguments.out,
        per_device_train_batch_size=8,
        max_steps=arguments.steps,
        learning_rate=1e-3,
        logging_steps=5,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model=model, args=options, train_dataset=Counting())
    result = trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        backend = torch.distributed.get_backend()
        print(f"{backend} with {options.world_size} ranks: loss {result.training_loss:.6f}")


if __name__ == "__main__":
    main()
