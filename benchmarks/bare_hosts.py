"""From two bare hosts - an sshd and a password, no key, no packages, no way to the internet - to a trained model.

    .venv/bin/python benchmarks/bare_hosts.py [--profile demo] [--set KEY=VALUE ...] [--json FILE]

Needs root and Linux: the hosts are network namespaces with an sshd each (``tests/lab``), and share the processors and
the system's Python of this machine, not its packages. The first command is typed on a terminal: each host key is
compared, each password given once. The second is the same without a terminal and with ``--no-input``: what it needs is
there by then. About eight minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from tests.lab.terminal import CLI, Terminal, environment
from training.records.events import StepEvent
from training.records.run_folder import RunFolder
from training.records.runs import find_run

SECRET = "a-password-nobody-has"
NAMES = ("one", "two")
PATIENCE = 3600.0


def first_step(folder: Path) -> float:
    """Return when the last member took its first step."""
    steps = [event for event in RunFolder.open(folder).events() if isinstance(event, StepEvent) and event.step == 1]
    return max(event.time for event in steps)


def hosts_file(lab: Lab, folder: Path) -> Path:
    """Name the machines, and leave out everything that they would have to have."""
    config = folder / "ssh_config"
    config.write_text(f"UserKnownHostsFile {folder / 'known_hosts'}\nMatch all\nInclude {lab.ssh_config}\n")
    path = folder / "distributed_hosts.json"
    path.write_text(json.dumps({"machines": list(NAMES), "ssh_config": str(config)}))
    return path


def by_hand(folder: Path, words: list[str]) -> tuple[float, str]:
    """Run the command on a terminal and answer what it asks; return when it began and what it showed."""
    begin = time.time()
    terminal = Terminal(folder, *words)
    for _ in NAMES:
        terminal.wait_for("Do the two match? [y/N]")
        terminal.type("y")
    for _ in NAMES:
        terminal.wait_for("Password of root at")
        terminal.type(SECRET)
    terminal.wait_for("Done: ", PATIENCE)
    code = terminal.exit_code()
    if code:
        raise SystemExit(f"the first run ended with {code}:\n{terminal.screen}")
    return begin, terminal.screen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", default="demo-scratch")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    settings = [word for setting in asked.settings for word in ("--set", setting)]
    bare = [HostSpec(name, password=SECRET, key=False) for name in NAMES]
    with Lab(*bare) as lab, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = ["distributed-train", asked.profile, "--hosts", str(hosts_file(lab, folder)), *settings]
        words += ["--strategy", "auto"]
        began, screen = by_hand(folder, words)
        first = find_run(folder / "output", asked.profile)
        second_began = time.time()
        done = subprocess.run(
            [sys.executable, CLI, *words, "--no-input", "--set", "max_steps=30"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment(folder),
            cwd=folder,
            timeout=PATIENCE,
        )
        second = find_run(folder / "output", asked.profile)
        metrics = RunFolder.open(first).metadata.metrics
        found = {
            "seconds_to_first_step": first_step(first) - began,
            "seconds_to_model": RunFolder.open(first).metadata.metrics["seconds"] + first_step(first) - began,
            "metrics": metrics["after"],
            "strategy": RunFolder.open(first).metadata.strategy,
            "why": RunFolder.open(first).metadata.strategy_reason,
            "again_exit_code": done.returncode,
            "again_seconds_to_first_step": first_step(second) - second_began,
        }
        print(json.dumps(found, indent=2))
        if asked.json:
            asked.json.write_text(json.dumps(found | {"screen": screen}, indent=2))
        if done.returncode:
            raise SystemExit(done.stderr)


if __name__ == "__main__":
    main()
