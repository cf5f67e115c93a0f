"""What is worth knowing of the core on a GPU, in one session: a process and a time limit for each case.

    .venv/bin/python benchmarks/gpu_session.py --out FOLDER [--device cuda] [--budget 690] [--only TEXT ...] [--tiny]

Cases come in the order of their value, and one is skipped where what is left of the budget (seconds) is short for it.
Each result is appended to FOLDER/results.jsonl at once, so a session that is cut off loses the running case alone, and
the same command goes on with what FOLDER has no result of; what a case writes besides is in FOLDER/NAME.log. ``--tiny``
takes two steps of tiny models, also with ``--device cpu``: no mistake of the script should cost time on a GPU. The
table of all results comes last. The cases: ``gpu_cases.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LEAST = 0.5
"""Of a case's limit, which must be left for it to begin."""


@dataclass(frozen=True)
class SessionCase:
    """One thing to measure."""

    name: str
    limit: float
    """Seconds after which it is ended."""
    arguments: tuple[str, ...]
    """Of Python: a script that prints a JSON object a line, among other lines."""


def case(name: str, limit: float, *arguments: str) -> SessionCase:
    """Return a case of ``gpu_cases.py``."""
    return SessionCase(name, limit, (str(ROOT / "benchmarks" / "gpu_cases.py"), *arguments))


def cases() -> list[SessionCase]:
    """Return the cases, the most valuable first."""
    gpts = ("muster", "muster compiled", "bare", "bare compiled", "trainer")
    return [
        case("ceilings", 40, "ceilings"),
        case("whisper small, all weights", 75, "whisper", "small", "full"),
        *(case(f"gpt {way}", 50, "gpt", way) for way in gpts),
        case("whisper large, LoRA", 90, "whisper", "large", "lora"),
        case("whisper tiny, all weights, augmentation", 60, "whisper", "tiny", "augmented"),
        case("profile of gpt", 40, "profile"),
        case("memory of whisper large, LoRA, base in bf16", 60, "memory", "large", "lora", "bf16"),
        case("memory of whisper large, LoRA, base in fp32", 60, "memory", "large", "lora", "fp32"),
        case("memory of whisper small, all weights", 40, "memory", "small", "full", "auto"),
        case("snapshot of gpt", 40, "snapshot"),
        *(case(f"evaluation of whisper small by {size}", 50, "evaluation", size) for size in ("64", "8")),
        *(case(f"two members, {name}", 60, "members", name) for name in ("allreduce", "diloco", "demo", "zero1")),
        case("samples of 10 ms", 40, "loader"),
        SessionCase("tests", 120, ("-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests/exchange")),
    ]


def run_session(
    chosen: Sequence[SessionCase],
    out: Path,
    budget: float,
    extra: Sequence[str] = (),
    tell: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Run cases until the budget is spent; return their records, which are in ``out`` too. A case that is done there is
    not run again.

    Args:
        budget: seconds for all.
        extra: further arguments of each case of ``gpu_cases.py``.
    """
    out.mkdir(parents=True, exist_ok=True)
    end, records, done = time.monotonic() + budget, [], _done(out / "results.jsonl")
    for one in chosen:
        if one.name in done:
            records.append(done[one.name])
            continue
        left = end - time.monotonic()
        if left < _LEAST * one.limit:
            record: dict[str, Any] = {"case": one.name, "status": "skipped", "left": round(left, 1)}
        else:
            record = _run(one, out, min(left, one.limit), extra)
        records.append(record)
        with (out / "results.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
        tell(f"{record['status']:8} {one.name} ({record.get('seconds', 0):.0f} s)")
    return records


def _done(results: Path) -> dict[str, dict[str, Any]]:
    """Return the records of the cases that an earlier session has finished, by name."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = [record for line in lines if (record := _result(line)) is not None]
    return {record["case"]: record for record in found if record["status"] == "done"}


def _run(one: SessionCase, out: Path, limit: float, extra: Sequence[str]) -> dict[str, Any]:
    own = one.arguments[0].endswith("gpu_cases.py")
    command = [sys.executable, *one.arguments, *(extra if own else ())]
    start, log = time.monotonic(), out / f"{one.name.replace(' ', '-').replace(',', '')}.log"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, start_new_session=True
        )
        try:
            written, status = process.communicate(timeout=limit)[0], "done"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers that it started
            written, status = process.communicate()[0], "limit"
        if status == "done" and process.returncode:
            status = "failed"
        errors.write(written)
    results = [found for line in written.splitlines() if (found := _result(line)) is not None]
    return {
        "case": one.name, "status": status, "seconds": round(time.monotonic() - start, 1), "results": results,
    }  # fmt: skip


def _result(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as Markdown."""
    lines = ["| case | | result |", "|---|---|---|"]
    for record in records:
        for result in record.get("results") or [{}]:
            said = ", ".join(f"{name} {_short(value)}" for name, value in result.items())
            lines.append(f"| {record['case']} | {record['status']} | {said} |")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"], default="cuda")
    parser.add_argument("--budget", type=float, default=690.0)
    parser.add_argument("--only", nargs="*", default=[], help="only cases with one of these texts in their names")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    chosen = [one for one in cases() if not arguments.only or any(text in one.name for text in arguments.only)]
    extra = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    records = run_session(chosen, arguments.out, arguments.budget, extra, lambda line: print(line, flush=True))
    written = table(records)
    (arguments.out / "table.md").write_text(written + "\n", encoding="utf-8")
    print(written)
    return int(any(record["status"] in ("failed", "limit") for record in records))


if __name__ == "__main__":
    sys.exit(main())
