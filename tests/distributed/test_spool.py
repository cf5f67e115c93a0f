"""The records that an agent keeps until its supervisor has them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.agent.spool import Spool


def event(spool: Spool, number: int) -> tuple[int, str]:
    number, line = spool.read(number, 0)
    return number, json.loads(line)["event"] if line else ""


def test_a_full_disk_costs_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path / "spool", segment=1)
    spool.append({"event": "one"})

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        full.setattr(os, "open", refuse)
        spool.append({"event": "two"})
    spool.append({"event": "three"})
    assert [event(spool, n) for n in (1, 2, 3)] == [(1, "one"), (2, "two"), (3, "three")]
    assert spool.read(4, 0) == (4, b"")
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_files_go_with_the_records_that_are_written_down(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", segment=100)
    for number in range(1, 101):
        spool.append({"event": str(number)})
    files = len(list(tmp_path.iterdir()))
    spool.forget(99)
    assert files > 20 and len(list(tmp_path.iterdir())) == 1
    assert event(spool, 100) == (100, "100")
    number, text = event(spool, 1)
    assert 1 < number <= 100 and text == str(number)
    spool.close()


@given(st.lists(st.one_of(st.just("append"), st.tuples(st.sampled_from(["read", "forget"]), st.integers(1, 40)))))
def test_what_is_not_forgotten_is_read_in_order(steps: list[object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool, count, forgotten = Spool(Path(folder) / "spool", segment=60), 0, 0
        for step in steps:
            if isinstance(step, tuple):
                action, number = step
                if action == "forget":
                    number = min(number, count)  # a supervisor has no other records than it was sent
                    spool.forget(number)
                    forgotten = max(forgotten, number)
                    continue
                actual, text = event(spool, number)
                assert text == (str(actual) if actual <= count else "")
                assert number <= actual <= max(number, forgotten + 1)
            else:
                count += 1
                spool.append({"event": str(count)})
        spool.close()
