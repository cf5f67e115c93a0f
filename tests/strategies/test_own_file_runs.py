"""Runs of real processes with a strategy that lies in a file of somebody's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stand_ins import Half
from torch import nn

from training.local_trainer import LocalTrainer
from training.records.events import Event, SyncEvent, from_line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OWN = Path(__file__).with_name("stand_ins.py")
SPIRALS = ROOT / "examples" / "custom" / "spirals.py"


def test_the_command_line_takes_a_file_together_with_another_strategy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN.read_text())
    options = {"task": "custom", "model-path": f"{SPIRALS}:build", "local": "2", "max-steps": "6", "output": "runs"}
    options |= {"strategy": "mine.py:All + sparta", "strategy-options": "interval = 3", "eval-interval": "0"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, str(ROOT / "cli_typer.py"), "distributed-train", *words, "--no-input", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if (path / "events.jsonl").exists())
    assert json.loads((folder / "plan.json").read_text())["profile"]["strategy"]["strategy"].endswith(":All + sparta")
    events = [from_line(line) for line in folder.joinpath("events.jsonl").read_bytes().splitlines()]
    syncs = [one for one in events if isinstance(one, SyncEvent) and one.member == 0]
    assert [one.step for one in syncs if one.rounds and "whole" in one.rounds] == [3, 6]
    assert {one.step for one in syncs if one.rounds and "sparta" in one.rounds} == {1, 2, 3, 4, 5, 6}


def test_local_trainer_takes_the_class_itself(tmp_path: Path) -> None:
    events: list[Event] = []
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    pairs = list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))
    trainer = LocalTrainer(
        nn.Linear(4, 1), pairs, loss=nn.functional.mse_loss, output_dir=tmp_path, on_event=events.append
    )
    model = trainer.fit(strategy=Half, strategy_options="late = true", max_steps=40, learning_rate=0.05, batch_size=8)
    assert len([one for one in events if isinstance(one, SyncEvent) and one.member == 1]) == 40
    assert (model(torch.ones(1, 4)) - 4.0).abs().item() < 2.0
