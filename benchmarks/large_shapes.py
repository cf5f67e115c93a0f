"""Shapes of models that no machine at home holds, on three lab hosts: starts, trains five steps, memory as predicted.

    .venv/bin/python benchmarks/large_shapes.py [whisper-large-v3] [llama-3b] [--layers 2] [--window full] [--mbit 1000]

Random weights of a published width, vocabulary and number of heads, with as many layers as this machine has memory for:
all three hosts share it. Whisper trains all weights, the Llama adapters on a frozen base; fp32, AdamW. The plan
measures the hosts' blocks and links, and cuts the model. *Predicted* is what the plan says that each host needs;
*measured* the largest memory of its worker until the last step has ended: what is its own (``RssAnon``), and the files
that it maps (``RssFile``).
Prints a Markdown table. Needs root; a Whisper of ``--layers 2`` takes about 8 GB of memory and ten minutes
on two busy cores. Lists of one block are not cut.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "speech")]

from hybrid_lab import train
from staged_memory import whisper_folder
from transformers import LlamaConfig, LlamaForCausalLM

from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from tests.tasks.tiny_tasks import byte_tokenizer
from training.records.events import StepEvent
from training.records.plan import read_plan
from training.records.run_folder import RunFolder

STEPS, SAMPLES = 5, 6
_SAMPLE_SECONDS = 0.05
_COMMON = {"max_steps": STEPS, "batch_size": SAMPLES, "eval_interval": 0, "eval_before": False, "snapshot_interval": 0,
           "mixed_precision": "off", "device": "cpu", "layout": "pipeline", "threads": 1}  # fmt: skip


def whisper_large_v3(folder: Path, layers: int, window: str) -> dict[str, Any]:
    """Make a Whisper of large-v3's width with so many layers in encoder and decoder; return the options to train it."""
    whisper_folder(folder, 1280, layers, mel=128, vocabulary=51866)
    return {"task": "whisper", "model_path": folder, "dataset_path": ROOT / "examples" / "spoken_commands",
            "language": "en", "window": window, "eval_generate": False, "max_train_samples": STEPS * SAMPLES,
            "max_eval_samples": 2}  # fmt: skip


def llama_3b(folder: Path, layers: int, window: str) -> dict[str, Any]:
    """Make a Llama of the width of one of 3 billion weights with so many layers; return the options to train it."""
    text = folder / "text"
    text.mkdir()
    (text / "input.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    byte_tokenizer().save_pretrained(folder)
    shape = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=layers, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return {"task": "causal_lm", "model_path": folder, "dataset_path": text, "block_size": 32, "tuning": "lora",
            "from_scratch": False}  # fmt: skip


SHAPES: dict[str, tuple[str, Callable[[Path, int, str], dict[str, Any]]]] = {
    "whisper-large-v3": ("whisper-small-full", whisper_large_v3),
    "llama-3b": ("instruct-lora", llama_3b),
}
"""The profile that trains each shape, and what makes its folder."""


class Sample(NamedTuple):
    """The memory of a process, in bytes."""

    own: int
    mapped: int
    time: float

    @property
    def total(self) -> int:
        return self.own + self.mapped


class MemoryWatch:
    """Reads the memory of the workers of hosts again and again: what is their own, and the files that they map. Weights
    that are not trained stay in the mapped file, and are needed in each step all the same."""

    def __init__(self, lab: Lab) -> None:
        self._samples: dict[str, list[Sample]] = {host.name: [] for host in lab}
        self._lab, self._ended = lab, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def peak(self, host: str, until: float) -> Sample:
        """Return the most memory of a host's worker before a time: merged adapters are written to mapped files later,
        which the system can evict."""
        return max((each for each in self._samples[host] if each.time <= until), key=lambda each: each.total)

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            for host in self._lab:
                with contextlib.suppress(OSError, StopIteration):
                    self._read(host)

    def _read(self, host: LabHost) -> None:
        for pid in host.pids("training.workers.worker"):
            self._samples[host.name].append(Sample(resident(pid, "RssAnon"), resident(pid, "RssFile"), time.time()))


def resident(pid: int, kind: str) -> int:
    """Return the bytes of a kind that ``/proc/PID/status`` names."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def compare(name: str, layers: int, window: str, mbit: float) -> Iterator[str]:
    """Yield the lines of a shape."""
    profile, make = SHAPES[name]
    with tempfile.TemporaryDirectory() as place, Lab(*(HostSpec(host, mbit=mbit) for host in "abc")) as lab:
        model = Path(place) / "model"
        model.mkdir()
        options = {**_COMMON, **make(model, layers, window), "cache_dir": Path(place) / "cache"}
        watch = MemoryWatch(lab)
        path = train(Path(place), profile, ["--hosts", str(lab.hosts_file)], options)
        watch.end()
        steps = {event.step: event.time for event in RunFolder.open(path).events() if isinstance(event, StepEvent)}
        assert max(steps) == STEPS, steps
        planning = json.loads((path / "planning.json").read_text())
        needs = {member["name"]: member["memory"] for member in planning["ranking"][planning["chosen"]]["members"]}
        (member,) = read_plan(path / "plan.json").members
        for device in member.devices:
            need, peak = needs[device.machine], watch.peak(device.machine, steps[STEPS])
            blocks = f"blocks {device.blocks[0] + 1} to {device.blocks[1]}" if device.blocks else "all blocks"
            sizes = " | ".join(f"{size / 1e6:.0f} MB" for size in (need, peak.total, peak.mapped))
            yield f"| {name}, {blocks} | {sizes} | {need / peak.total:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help="default: both")
    parser.add_argument(
        "--layers", type=int, default=2, help="of the encoder and of the decoder, or of the Llama; 2 or more"
    )
    parser.add_argument("--window", default="full", help="of Whisper; shorter ones compute less")
    parser.add_argument("--mbit", type=float, default=1000.0)
    arguments = parser.parse_args()
    print("| trained | predicted | measured | of that mapped files | predicted / measured |\n|---|---|---|---|---|")
    for name in arguments.shapes:
        for line in compare(name, arguments.layers, arguments.window, arguments.mbit):
            print(line, flush=True)


if __name__ == "__main__":
    main()
