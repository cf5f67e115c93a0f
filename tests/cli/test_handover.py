"""A light core and the commands that need PyTorch: which of them have it installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from app.cli.main import main
from muster import __main__ as muster_command
from profiles.errors import BadInput

LINES = """
train demo --local 2
distributed-train demo
launch -- x.py --foo 3
compare a b
plan demo
doctor --self-test
data prepare a --out b
chat .
model export . --to onnx
model evaluate . DATA
model transcribe . a.wav
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_a_light_core_is_equipped_for_what_trains(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def equip() -> None:
        raise BadInput("not equipped", "nothing")

    monkeypatch.chdir(tmp_path)
    for module in ("commands", "machines.doctor"):
        monkeypatch.setattr(f"app.cli.{module}.can_train", lambda: False)
    monkeypatch.setattr("app.cli.handover.equip_here", equip)
    assert main(line.split()) == 2
    assert "not equipped" in capsys.readouterr().err


def test_a_package_that_this_installation_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lookup = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "speech" else lookup(name))
    assert muster_command.main() == 2
    assert capsys.readouterr().err.startswith("error: Muster's package 'speech' is missing here\nhint: ")
