"""What the dashboard costs: processor, memory, key to paint, and training beside it, in a real terminal.

    .venv/bin/python benchmarks/dashboard_cost.py --seconds 30

A process of one thread "trains" (a matrix product and an event a step, into a real run folder); another one prints
20,000 lines a second into a log of the same folder. ``cli_typer.py attach`` runs in a pseudo-terminal of 120x32. Its
processor time and memory are the kernel's figures of that process. For key to paint a tab is opened by its key, and the
clock stops when a word that stands on that tab alone has arrived. Training is compared with the dashboard stopped
(SIGSTOP) and going on (SIGCONT) in turns of half a second, so that other load of the machine meets both alike.
``--nice -15`` (root) lets everything that is measured, training included, go before what else the machine does. About
three minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from profiles.files.resolve import profile_from_options
from training.records.events import MachineEvent, MemberEvent, RunEvent, StepEvent, SyncEvent
from training.records.plan import MemberPlan, RunPlan
from training.records.run_folder import RunFolder, new_run_id

COLUMNS, LINES = 120, 32
KEYS = ((b"2", b"compute/wait"), (b"4", b"Mbit/s"), (b"5", b"all machines"), (b"6", b"at step"), (b"3", b"smoothed"))
SLICE, SETTLE = 0.5, 0.15
COUNT, PRODUCTS = "products", 12
STEP = 0.02


def train(folder: Path, work: bool) -> None:
    """Be the training: steps of a fixed amount of work, or of a fixed time, and their events."""
    import numpy as np

    with RunFolder.take_over(folder) as run:
        run.append(RunEvent(status="running", total_steps=10**6))
        for rank in range(3):
            run.append(MemberEvent(member=rank, status="started", name=f"machine-{rank}", device="cpu"))
        left, right, step, done = np.ones((300, 300)), np.ones((300, 300)), 0, 0
        with (folder / COUNT).open("r+b") as stream, mmap.mmap(stream.fileno(), 8) as count:
            while True:
                step += 1
                for _ in range(PRODUCTS if work else 0):
                    left @ right
                    done += 1
                    count[:] = struct.pack("q", done)
                if not work:
                    time.sleep(1.0)
                _tell(run, step)


def _tell(run: RunFolder, step: int) -> None:
    for rank in range(3):
        run.append(
            StepEvent(member=rank, step=step, epoch=0.1, loss=2.0 / step**0.3, learning_rate=1e-3, samples=8, weight=8,
                      compute=STEP, wait=0.004, transfer=0.01, grad_norm=1.0, bytes_sent=1000, bytes_received=1000)
        )  # fmt: skip
        if step % 20 == 0:
            run.append(MachineEvent(member=rank, cpu_percent=90, memory_used=10**9, memory_total=16 * 10**9))
            run.append(SyncEvent(member=rank, step=step, round=step // 20, bytes_sent=10**6, bytes_received=10**6,
                                 seconds=0.1, wait=0.01, members=[0, 1, 2]))  # fmt: skip


def flood(path: Path, rate: int = 20_000) -> None:
    """Print lines into a log, so many a second."""
    number, began = 0, time.monotonic()
    with path.open("ab", buffering=0) as stream:
        while True:
            due = int((time.monotonic() - began) * rate)
            lines = [b"line %d of a worker that says far too much about everything\n" % n for n in range(number, due)]
            stream.write(b"".join(lines))
            number = due
            time.sleep(0.01)


class Terminal:
    """The dashboard in a pseudo-terminal."""

    def __init__(self, folder: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._seen = bytearray()
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "cli_typer.py"), "attach", str(folder)],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "MUSTER_OPENING_PAUSE": "0"},
        )  # fmt: skip
        os.close(slave)
        self.process = psutil.Process(self._process.pid)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:
                return
            with self._news:
                self._seen += data
                self._news.notify_all()

    def key_to_paint(self, key: bytes, word: bytes, patience: float = 5.0) -> float:
        """Return the seconds from a key to a word of the screen that it opens."""
        with self._news:
            self._seen.clear()
        began = time.perf_counter()
        os.write(self._master, key)
        with self._news:
            if not self._news.wait_for(lambda: word in self._seen, patience):
                raise SystemExit(f"{word!r} was not painted within {patience} s")
        return time.perf_counter() - began

    def wait_for(self, word: bytes, patience: float = 20.0) -> None:
        with self._news:
            if not self._news.wait_for(lambda: word in self._seen, patience):
                raise SystemExit(f"{word!r} was not painted: {bytes(self._seen[-2000:])!r}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Trainer:
    """The training process and how much work it has done."""

    def __init__(self, folder: Path, work: bool) -> None:
        self._count = folder / COUNT
        self._count.write_bytes(bytes(8))
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--train", str(folder), *(["--work"] if work else [])],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    @property
    def done(self) -> int:
        """Matrix products so far."""
        return int(struct.unpack("q", self._count.read_bytes())[0])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def waiting(process: psutil.Process) -> float:
    """Return the seconds that a process's first thread was ready to run and had no processor (Linux)."""
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9


def spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return (
        f"median {statistics.median(ordered) * 1e3:.0f} ms, 95 % {high * 1e3:.0f} ms, worst {ordered[-1] * 1e3:.0f} ms"
    )


def new_run(folder: Path) -> Path:
    options = {"model_path": "none", "dataset_path": "none", "strategy": "diloco"}
    plan = RunPlan(
        run_id=new_run_id(),
        profile=profile_from_options("cost", options),
        members=tuple(MemberPlan(rank=rank, name=f"machine-{rank}", batch_size=8) for rank in range(3)),
        engine="mesh",
    )
    run = RunFolder.create(folder, plan, ["benchmark"], run_type="distributed")
    run.close()
    return run.path


def idle(folder: Path, seconds: float) -> str:
    trainer = Trainer(run := new_run(folder), work=False)
    time.sleep(1.0)
    terminal = Terminal(run)
    try:
        terminal.wait_for(b"Healthy")
        time.sleep(3.0)
        before = cpu(terminal.process)
        time.sleep(seconds)
        share = (cpu(terminal.process) - before) / seconds
        return f"| idle, three members with a step a second | {share:.1%} of a core | at most 15 % |"
    finally:
        terminal.close()
        trainer.close()


def flooded(folder: Path, seconds: float) -> list[str]:
    trainer = Trainer(run := new_run(folder), work=True)
    (run / "logs").mkdir(exist_ok=True)
    printer = subprocess.Popen([sys.executable, __file__, "--flood", str(run / "logs" / "machine-0.log")])
    time.sleep(1.0)
    terminal = Terminal(run)
    try:
        terminal.wait_for(b"Healthy")
        before, began, most = cpu(terminal.process), time.monotonic(), 0
        delays: list[float] = []
        own: list[float] = []
        while time.monotonic() - began < seconds:
            for key, word in KEYS:
                waited = waiting(terminal.process)
                delays.append(terminal.key_to_paint(key, word))
                own.append(max(0.0, delays[-1] - (waiting(terminal.process) - waited)))
                most = max(most, terminal.process.memory_info().rss)
                time.sleep(0.37)
        share = (cpu(terminal.process) - before) / (time.monotonic() - began)
        terminal.key_to_paint(b"5", b"all machines")
        slower = slowed(trainer, terminal, int(2 * seconds))
        return [
            f"| 20,000 lines/s: key to paint, {len(delays)} keys | {spread(delays)} | at most 150 ms |",
            f"| ... less what the dashboard waited for a processor | {spread(own)} | at most 150 ms |",
            f"| 20,000 lines/s: memory | {most / 1e6:.0f} MB | under 200 MB |",
            f"| 20,000 lines/s and {trainer.done // PRODUCTS} steps: processor | {share:.1%} of a core | |",
            slower,
        ]
    finally:
        terminal.close()
        printer.kill()
        trainer.close()


def slowed(trainer: Trainer, terminal: Terminal, pairs: int) -> str:
    """Compare the work done beside the dashboard with that while it stands still, in short turns."""
    sums = {signal.SIGSTOP: 0.0, signal.SIGCONT: 0.0}
    ratios = []
    for pair in range(pairs):
        rates = {}
        order = (signal.SIGSTOP, signal.SIGCONT)
        for number in order if pair % 2 else order[::-1]:
            terminal.process.send_signal(number)
            time.sleep(SETTLE)
            before, began = trainer.done, time.monotonic()
            time.sleep(SLICE)
            rates[number] = (trainer.done - before) / (time.monotonic() - began)
            sums[number] += rates[number]
        ratios.append(rates[signal.SIGCONT] / max(1e-9, rates[signal.SIGSTOP]))
    terminal.process.send_signal(signal.SIGCONT)
    quarters = statistics.quantiles(ratios, n=4)
    whole = sums[signal.SIGCONT] / sums[signal.SIGSTOP]
    return (
        f"| 20,000 lines/s: training beside the dashboard / with it stopped, {pairs} pairs of {SLICE:g} s "
        f"| {whole:.3f} in all; pairs: median {quarters[1]:.3f}, quartiles {quarters[0]:.3f} to {quarters[2]:.3f} "
        "| at least 0.98 |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--nice", type=int, default=0, help="priority of all that is measured, on a busy machine")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--flood", type=Path)
    arguments = parser.parse_args()
    if arguments.train:
        return train(arguments.train, arguments.work)
    if arguments.flood:
        return flood(arguments.flood)
    if arguments.nice:
        os.nice(arguments.nice)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="muster-dashboard-cost-") as place:
        print(f"{os.cpu_count()} cores, load before the start {load:.1f}\n\n| what | measured | aim |\n|---|---|---|")
        print(idle(Path(place) / "idle", arguments.seconds), flush=True)
        print("\n".join(flooded(Path(place) / "flood", arguments.seconds)), flush=True)
    return None


if __name__ == "__main__":
    main()
