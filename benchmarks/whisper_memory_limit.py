"""A real training of a Whisper under a limit on memory: killed as it was set, completed as it is fitted.

    sudo .venv/bin/python benchmarks/whisper_memory_limit.py --model FOLDER [--limit 1900000000]

Two runs of two steps of the profile ``demo`` with whole windows, each in a control group of its own (first version,
Linux, root). The first one starts as if nothing were compared; the second one is ``distributed-train`` as a person
starts it. Prints how each ended and its peak. Some minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = Path("/sys/fs/cgroup/memory")
UNFITTED = """\
import sys
import app.cli.train.start as train
assert train.fit
train.fit = lambda profile, rooms, tell: profile
from app.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run(program: list[str], model: str, limit: int, name: str) -> None:
    """Start a run in a control group of its own and say how it ended."""
    group = GROUPS / f"muster-{os.getpid()}-{name.replace(' ', '-')}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit))
    (group / "memory.swappiness").write_text("0")
    settings = {"model_path": model, "max_steps": 2, "max_train_samples": 64, "max_eval_samples": 4, "window": "full",
                "augmentation": 0, "eval_generate": "false", "eval_before": "false"}  # fmt: skip

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    with tempfile.TemporaryDirectory() as output:
        given = [f"--set={key}={value}" for key, value in {**settings, "output_dir": output}.items()]
        command = [sys.executable, *program, "distributed-train", "demo", "--local", "1", *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=enter)
    lines = [line for line in done.stderr.splitlines() if "instead of" in line or line.startswith("error")]
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    group.rmdir()
    ended = "completed" if done.returncode == 0 else f"ended with {done.returncode}"
    print(f"{name}: {ended}, peak {peak / 1e9:.2f} GB of {limit / 1e9:.2f} GB; {' '.join(lines)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--limit", type=int, default=1_900_000_000)
    arguments = parser.parse_args()
    model = str(Path(arguments.model).resolve())
    run(["-c", UNFITTED], model, arguments.limit, "as it was set")
    run(["cli_typer.py"], model, arguments.limit, "fitted")


if __name__ == "__main__":
    main()
