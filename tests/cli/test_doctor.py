"""``doctor``: this computer checked, all of it or one thing by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main
from distributed.checks.findings import CHECKS, Finding
from training.trial.self_test import SelfTestRow

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "checking.md"
Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_this_computer_is_checked_and_all_that_is_found_is_listed(capsys: Capture) -> None:
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {"python", "memory", "device"} <= {finding["check"] for finding in found} <= set(CHECKS)


def test_checks_are_listed_and_a_wrong_name_is_refused(capsys: Capture) -> None:
    assert main(["doctor", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} " in out for name in CHECKS)
    assert main(["doctor", "memry"]) == 2
    assert "did you mean 'memory'?" in capsys.readouterr().err


def test_one_check_by_name(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Examined:
        findings = (
            Finding("memory", "problem", "none free", "2 GB", "close programs"),
            Finding("heat", "ok", "40 C", "below 90 C"),
        )

    monkeypatch.setattr("distributed.checks.examination.examine", lambda hosts, task: [Examined])
    assert main(["doctor", "heat", "driver"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ok", "heat", "40", "C"], ["-", "driver", "nothing", "to", "check", "here"],
    ]  # fmt: skip
    assert main(["doctor", "memory"]) == 3
    out = capsys.readouterr().out
    assert "none free (needed: 2 GB)" in out and "fix: close programs" in out


def test_every_check_is_documented() -> None:
    said = DOCUMENT.read_text()
    assert [name for name in CHECKS if f"`{name}`" not in said] == []


def test_a_self_test_writes_its_report(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [SelfTestRow("steps in fp32", "1.2 ms a step"), SelfTestRow("steps in bf16", "not supported", ok=False)]
    asked: list[str] = []
    monkeypatch.setattr("training.trial.self_test.self_test", lambda device, tell: [asked.append(device), *rows][1:])
    assert main(["doctor", "--self-test", "--device", "mps", "--out", str(tmp_path / "report.md")]) == 3
    assert asked == ["mps"] and "failed: steps in bf16" in capsys.readouterr().out
    assert "| steps in fp32 | 1.2 ms a step | ok |" in (tmp_path / "report.md").read_text()
