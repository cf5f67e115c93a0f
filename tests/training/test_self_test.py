"""A device measured in minutes, as a report."""

from __future__ import annotations

import threading

import pytest
import torch

from training.hardware.device_probe import TINY
from training.trial import self_test as parts
from training.trial.self_test import SelfTestRow, report, self_test


def test_a_processor_is_measured_and_every_part_holds() -> None:
    lines: list[str] = []
    before = set(threading.enumerate())  # those of earlier tests may still write
    rows = self_test("cpu", 1, TINY, lines.append)
    assert [row for row in rows if not row.ok] == []
    begun = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("snapshots") for thread in begun), "its folder is gone"
    whats = {row.what for row in rows}
    assert {"system", "products in bf16", "copies on the device", "steps in fp32", "codecs", "snapshot"} <= whats
    assert {"layout pipeline", "layout shard", "layout tensor"} <= whats
    assert len(lines) == len(rows)
    assert all(f"| {row.what} | {row.result} | ok |" in report(rows) for row in rows)


def test_what_a_back_end_refuses_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> dict[str, float]:
        raise NotImplementedError("aten::copy is not implemented for 'MPS'")

    monkeypatch.setattr(parts, "copy_speeds", refuses)
    rows = self_test("cpu", 1, TINY)
    failed = [row for row in rows if not row.ok]
    assert [row.what for row in failed] == ["copies"] and "aten::copy is not implemented" in failed[0].result
    assert rows[-1].what == "snapshot"


def test_other_bytes_of_a_codec_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (torch.zeros(1), torch.ones(1))
    right = (torch.ones(1), torch.ones(1))
    monkeypatch.setattr(parts, "_encoded", lambda name, *_: wrong if name == "int8" else right)
    row = next(row for row in self_test("cpu", 1, TINY) if row.what == "codecs")
    assert row == SelfTestRow("codecs", "other bytes than on the processor: int8", ok=False)
