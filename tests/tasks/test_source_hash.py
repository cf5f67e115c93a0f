"""Hashes of the source of a user's functions."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from training.tasks.own_code.source_hash import source_hash

STEP = """
import torch
SCALE = 2.0

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)

def helper(x):
    return x + 1

def step(model, batch):
    return SCALE * helper(model(batch))

minus = lambda output, target: output - target
"""
_numbers = itertools.count()


def module(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same module from another text, as after an edit."""
    file = folder / f"job{next(_numbers)}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("edited_job", file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited_job", made)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("edit", "changes"),
    [
        (("x + 1", "x + 2"), "step"),
        (("SCALE = 2.0", "SCALE = 3.0"), "step"),
        (("return super().forward(x)", "return -super().forward(x)"), "Net"),
        (("output - target", "target - output"), "minus"),
        (("return SCALE", "# as it was\n    return  SCALE"), ""),
    ],
)
def test_what_it_computes_counts_and_how_it_is_written_does_not(
    edit: tuple[str, str], changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("step", "Net", "minus")
    before = {name: source_hash([getattr(module(STEP, tmp_path, monkeypatch), name)]) for name in parts}
    edited = module(STEP.replace(*edit), tmp_path, monkeypatch)
    assert [name for name in parts if source_hash([getattr(edited, name)]) != before[name]] == [changes] * bool(changes)


@pytest.mark.parametrize(
    "installed", [torch.optim.AdamW, torch.nn.functional.mse_loss, torch.nn.CrossEntropyLoss(), torch.relu]
)
def test_what_is_installed_counts_by_its_name(installed: Any) -> None:
    assert source_hash([installed]) == source_hash([installed]) != source_hash([torch.optim.SGD])


def test_bound_arguments_count() -> None:
    first, second = (functools.partial(torch.optim.lr_scheduler.StepLR, step_size=size) for size in (1, 2))
    assert source_hash([first]) != source_hash([second])
    plain, smooth = (torch.nn.CrossEntropyLoss(label_smoothing=share) for share in (0.0, 0.1))
    assert source_hash([plain]) != source_hash([smooth])


PROCESS = """
import functools
from training.tasks.own_code.source_hash import source_hash

class Scale:
    pass

def step(model, batch, scale, kinds):
    return model(batch)

is_known = eval("lambda kind: kind in {'a', 'b', 'c', 'd'}")
print(source_hash([functools.partial(step, scale=Scale(), kinds={"a", "b", "c", "d"}), is_known]))
"""


@pytest.mark.slow
def test_another_process_has_the_same_hash() -> None:
    hashes = {
        subprocess.run(
            [sys.executable, "-c", PROCESS], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1
