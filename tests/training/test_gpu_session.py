"""The session on a GPU, dry: every case with two steps of tiny models on the processor, and what the driver does."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_cases
from benchmarks.gpu_session import SessionCase, cases, run_session, table

TINY = gpu_cases.Setting(torch.device("cpu"), tiny=True)
TOO_SLOW = ("compiled", "members", "tests")
"""Code is generated, or processes are started: by hand, with ``--tiny``."""
DRY = [
    one.arguments[1:] for one in cases() if not any(word in " ".join((one.name, *one.arguments)) for word in TOO_SLOW)
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", DRY, ids=" ".join)
def test_every_case_gives_figures(
    arguments: Sequence[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_cases, "CACHE", tmp_path_factory.getbasetemp() / "session")
    results = list(gpu_cases.CASES[arguments[0]](TINY, *arguments[1:]))
    assert results and json.dumps(results)
    figures = [value for result in results for value in result.values() if isinstance(value, float)]
    assert figures and all(map(math.isfinite, figures))


def script(name: str, limit: float, code: str) -> SessionCase:
    return SessionCase(name, limit, ("-c", code))


def test_results_are_kept_at_once_and_no_case_takes_the_others_with_it(tmp_path: Path) -> None:
    chosen = [
        script("good", 60, "import json; print('a word'); print(json.dumps({'ms': 2.0}))"),
        script("broken", 60, "print('{\"half\": 1}'); raise SystemExit(3)"),
        script("slow", 0.2, "import time; time.sleep(600)"),
        script("large", 10**6, "print()"),
    ]
    records = run_session(chosen, tmp_path, 120, tell=lambda line: None)
    assert [record["status"] for record in records] == ["done", "failed", "limit", "skipped"]
    assert [record.get("results") for record in records[:2]] == [[{"ms": 2.0}], [{"half": 1}]]
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records
    assert "| good | done | ms 2 |" in table(records) and "a word" in (tmp_path / "good.log").read_text()

    told: list[str] = []
    mended = script("broken", 60, "print('{\"half\": 2}')")
    again = run_session([chosen[0], mended], tmp_path, 120, tell=told.append)
    assert [record["results"] for record in again] == [[{"ms": 2.0}], [{"half": 2}]] and len(told) == 1


def test_the_most_valuable_come_first_and_fit_into_their_budget_in_part() -> None:
    names = [one.name for one in cases()]
    assert names[0] == "ceilings" and names[-1] == "tests" and len(set(names)) == len(names)
    assert all(0 < one.limit <= 120 for one in cases())
