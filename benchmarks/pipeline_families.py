"""Models of all families in the stages of a pipeline beside one process: losses, gradient norms, weights.

    .venv/bin/python benchmarks/pipeline_families.py [FAMILY ...] [--stages 2 3 4] [--steps 5]

Twelve families of transformers with 8 small blocks and random weights, and a module of one's own; five steps of AdamW,
four micro-batches of padded batches whose length changes from step to step, clipping over all stages. Each variant of a
family: as it is, with LoRA, with blocks that are computed anew in backward, with a frozen encoder, with the
micro-batches in two passes (accumulation). The stages are threads of one process that hand each other what a network
would carry. Prints a Markdown table with the largest differences over all cuts, relative to one process. A few minutes.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.layouts import families as known
from tests.layouts import pipeline_runs
from tests.layouts.families import BLOCKS, FAMILIES, WORDS, batch, config, loss
from tests.layouts.pipeline_runs import Figures, pipeline_run, whole_run
from training.layouts.stages.block_check import examine_own
from training.layouts.stages.cut import CutModel, place_stand_ins
from training.layouts.stages.pretrained_stage import redraw_adapters
from training.layouts.stages.stage import Cut
from training.tasks.pretrained import recompute_activations

CUTS = {2: (0, 3, BLOCKS), 3: (0, 2, 5, BLOCKS), 4: (0, 1, 3, 7, BLOCKS)}
"""Uneven ones, by the number of stages."""
Prepare = Callable[[Any], object]
_TARGETS = {"gpt2": ["c_attn", "c_fc"], "neox": ["query_key_value", "dense_h_to_4h"]}


class Piece(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(hidden)


class OwnModel(nn.Module):
    """Blocks in a list of any name, whose output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.position = nn.Embedding(WORDS, 32), nn.Parameter(0.1 * torch.randn(32))
        nn.init.normal_(self.embed.weight, std=0.1)
        self.pieces = nn.ModuleList(Piece() for _ in range(BLOCKS))
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids) + self.position
        for piece in self.pieces:
            hidden = piece(hidden)
        return self.head(hidden)


OWN = "a module of one's own"


def own_loss(model: nn.Module, samples: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(samples["input_ids"]).flatten(0, 1), samples["labels"].flatten())


def own_stages(*bounds: int) -> list[CutModel]:
    """Return all stages of a cut of :class:`OwnModel`."""
    shapes = {name: tensor.to("meta") for name, tensor in batch(config("llama")).items()}
    parts = []
    for number in range(len(bounds) - 1):
        part = copy.deepcopy(OwnModel())
        place_stand_ins(part, Cut(bounds, number), examine_own(part, lambda model: own_loss(model, shapes)))
        parts.append(CutModel(part.train(), own_loss))
    return parts


def lora(family: str) -> Prepare:
    targets = _TARGETS.get(family, ["q_proj", "v_proj"])
    config = LoraConfig(r=4, target_modules=targets, fan_in_fan_out=family == "gpt2")

    def prepare(model: Any) -> None:
        inject_adapter_in_model(config, model)
        redraw_adapters(model, 3)

    return prepare


def freeze_encoder(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".encoder." in name:
            parameter.requires_grad_(False)


def variants(family: str) -> dict[str, tuple[Prepare, int]]:
    """Return by name what is done to the model, and in how many parts a stage gets the micro-batches of a step."""
    plain: Prepare = lambda model: None  # noqa: E731
    if family == OWN:
        return {"all weights": (plain, 1), "accumulation": (plain, 2)}
    every = {"all weights": (plain, 1), "accumulation": (plain, 2), "LoRA": (lora(family), 1),
             "checkpointing": (recompute_activations, 1)}  # fmt: skip
    if family == "gemma3":  # whose norms magnify what rounding moves
        every["all weights, 64 bits"] = (lambda model: model.double(), 1)
    return {**every, "frozen encoder": (freeze_encoder, 1)} if family == "whisper" else every


def micro_batches(settings: Any, step: int) -> list[dict[str, torch.Tensor]]:
    """Return four padded micro-batches of a step, each of another length."""
    return [batch(settings, 10 * step + index, 2, length + step % 3) for index, length in enumerate((12, 9, 14, 11))]


def difference(runs: Sequence[Figures], expected: Figures) -> tuple[float, float]:
    """Return the largest relative differences of losses and of norms over all stages and steps."""
    pairs = [(got, wanted) for run in runs for got, wanted in zip(run, expected, strict=True)]
    return (max(abs(got[0] - wanted[0]) / abs(wanted[0]) for got, wanted in pairs),
            max(abs(got[1] - wanted[1]) / abs(wanted[1]) for got, wanted in pairs))  # fmt: skip


def of_family(family: str, numbers: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a family."""
    is_own = family == OWN
    settings = config("llama" if is_own else family)
    for name, (prepare, calls) in variants(family).items():

        def make_step(step: int) -> list[Any]:
            return micro_batches(settings, step)

        model = OwnModel() if is_own else known.plain_model(settings)
        prepare(model)
        expected, worst = whole_run(model, own_loss if is_own else loss, make_step), []
        for number in numbers:
            parts = own_stages(*CUTS[number]) if is_own else known.stages(settings, *CUTS[number])
            for part in parts:
                prepare(part.module)
            worst.append(difference(pipeline_run(parts, make_step, calls)[0], expected))
        losses, norms = (max(values) for values in zip(*worst))
        yield f"| {family} | {name} | {losses:.1e} | {norms:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[*FAMILIES, OWN], help="default: all")
    parser.add_argument("--stages", nargs="*", type=int, default=list(CUTS), choices=list(CUTS))
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    pipeline_runs.STEPS = arguments.steps
    torch.set_num_threads(1)
    print("| family | variant | losses | gradient norms |\n|---|---|---|---|")
    for family in arguments.families:
        for line in of_family(family, arguments.stages):
            print(line, flush=True)


if __name__ == "__main__":
    main()
