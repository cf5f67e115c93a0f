"""Memory of a model that workers hold together: what the plan's memory model predicts beside what each really took.

    .venv/bin/python benchmarks/staged_memory.py [--stages 3] [--rows TEXT ...]

Each row is a run of three steps (the second has the peak) with random weights of the shape of a Whisper or of a Llama,
in fp32 with AdamW, on workers of this machine. Measured is the largest memory that is a process's own (``RssAnon``),
with the program files that are mapped before it reads its stage, but without the model's; and what it has at that
moment. Python and torch are 600 MB of what is predicted. Prints a Markdown table; Linux only. About twenty minutes on
two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "speech")]

import psutil
from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig, WhisperFeatureExtractor
from transformers import WhisperForConditionalGeneration as Whisper

from distributed.planning.documents.cluster import ClusterMachine
from distributed.planning.layouts.stage_devices import StagedJob
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from tests.speech.tiny_speech import tiny_whisper
from tests.tasks.tiny_tasks import byte_tokenizer
from training.layouts.orders import micro_batches_under_way
from training.layouts.stages.bounds import bounds_of
from training.records.events import Event, TimingEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.run_controller import RunController
from training.tasks.registry import size_for

_SAMPLE_SECONDS = 0.02
_COMMON = {"max_steps": 3, "eval_interval": 0, "eval_before": False, "snapshot_interval": 0, "mixed_precision": "off",
           "device": "cpu", "layout": "pipeline"}  # fmt: skip


def llama(folder: Path, **changes: Any) -> dict[str, Any]:
    """Make a Llama of 67 M weights and a text; return the options to train it."""
    text = folder / "text"
    text.mkdir()
    (text / "input.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    byte_tokenizer().save_pretrained(folder)
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 16, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=16384, max_position_embeddings=256, **shape)).save_pretrained(folder)
    return {"task": "causal_lm", "model_path": folder, "dataset_path": text, "block_size": 128, **changes}


WHISPERS = {"tiny": (4, 384), "base": (6, 512), "small": (12, 768)}
"""Layers of encoder and decoder, and width, of published shapes: 37, 71 and 241 M weights."""


def whisper_folder(folder: Path, width: int, layers: int, mel: int = 80, vocabulary: int = 51865) -> None:
    """Make a Whisper with random weights, with so many layers in the encoder and in the decoder."""
    tiny_whisper(folder)
    of_both = {"layers": layers, "attention_heads": width // 64, "ffn_dim": 4 * width}
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in of_both.items()}
    heard = {"num_mel_bins": mel, "max_source_positions": 1500, "max_target_positions": 448}
    config = WhisperConfig.from_pretrained(folder, d_model=width, vocab_size=vocabulary, **heard, **sizes)
    Whisper(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=mel, chunk_length=30).save_pretrained(folder)


def whisper(folder: Path, shape: str, **changes: Any) -> dict[str, Any]:
    """Make a Whisper of a published shape; return the options to train it."""
    layers, width = WHISPERS[shape]
    whisper_folder(folder, width, layers)
    return {"task": "whisper", "model_path": folder, "dataset_path": ROOT / "examples" / "spoken_commands",
            "language": "en", "window": "full", "eval_generate": False, "max_train_samples": 18, "max_eval_samples": 4,
            **changes}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One way to train."""

    name: str
    options: Callable[..., dict[str, Any]]
    changes: dict[str, Any]


ROWS = (
    Row("Llama, 12 samples", llama, {"batch_size": 12}),
    Row("Llama, 12 samples, checkpointing", llama, {"batch_size": 12, "gradient_checkpointing": True}),
    Row("Llama, 12 samples, LoRA", llama, {"batch_size": 12, "tuning": "lora"}),
    *(Row(f"Whisper {shape}, 6 samples", whisper, {"shape": shape, "batch_size": 6}) for shape in WHISPERS),
    Row(
        "Whisper base, 6 samples, checkpointing",
        whisper,
        {"shape": "base", "batch_size": 6, "gradient_checkpointing": True},
    ),
    Row(
        "Whisper base, 6 samples, encoder frozen",
        whisper,
        {"shape": "base", "batch_size": 6, "freeze_encoder": True, "augmentation": 0.5},
    ),
)


class Watch:
    """Reads the memory of all workers again and again."""

    def __init__(self) -> None:
        self.idle: dict[int, int] = {}
        self.files: dict[int, int] = {}
        self.peaks: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def note(self, event: Event) -> None:
        """Take what an event says: the first worker is about to read its stage."""
        if isinstance(event, TimingEvent) and event.part == "worker: waits for the engine" and not self.idle:
            self.idle, self.files = dict(_memory("RssAnon")), dict(_memory("RssFile"))
            self.peaks.clear()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            for rank, size in _memory("RssAnon"):
                self.peaks[rank] = max(size, self.peaks.get(rank, 0))


def _memory(kind: str) -> Iterator[tuple[int, int]]:
    """Yield rank and bytes of each worker, of a kind that ``/proc/PID/status`` names."""
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
            if "training.workers.worker" in words:
                status = Path(f"/proc/{process.pid}/status").read_text()
                size = next(line.split()[1] for line in status.splitlines() if line.startswith(kind))
                yield int(words[words.index("--rank") + 1]), int(size) << 10
        except (psutil.Error, OSError, StopIteration):
            continue  # it has ended


def predicted(profile: Profile, plan: RunPlan) -> list[int]:
    """Return the bytes that each stage needs."""
    size, stages = size_for(profile), len(plan.processes)
    assert size is not None
    job = StagedJob(profile, size, profile, {}, size.stage, stages)
    bounds, machine = bounds_of(plan.members[0].devices, len(size.blocks)), ClusterMachine(name="this machine")
    under_way = [micro_batches_under_way(stage, stages, job.micro_batches) for stage in range(stages)]
    return [job.need(machine, *ends, count) for ends, count in zip(pairwise(bounds), under_way)]


def compare(row: Row, stages: int) -> Iterator[str]:
    """Yield the lines of a row."""
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        model.mkdir()
        options = {**_COMMON, **row.options(model, **row.changes), "cache_dir": Path(place) / "cache"}
        profile = profile_from_options("memory", options)
        plan, watch = plan_local_run(profile, stages), Watch()
        with RunFolder.create(Path(place) / "runs", plan, ["benchmark"]) as folder:
            run = RunController(plan, folder, watch.note)
            run.start()
            outcome = run.wait()
        watch.end()
        assert outcome.status == "completed", outcome.message
        for rank, need in enumerate(predicted(profile, plan)):
            mapped = watch.files[rank]
            peak, idle = watch.peaks[rank] + mapped, watch.idle[rank] + mapped
            sizes = " | ".join(f"{size / 1e6:.0f} MB" for size in (need, peak, idle))
            yield f"| {row.name}, stage {rank + 1} | {sizes} | {need / peak:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=[], help="only rows with one of these texts in the name")
    arguments = parser.parse_args()
    print("| trained | predicted | measured | before it reads | predicted / measured |\n|---|---|---|---|---|")
    for row in ROWS:
        if not arguments.rows or any(text in row.name for text in arguments.rows):
            for line in compare(row, arguments.stages):
                print(line, flush=True)


if __name__ == "__main__":
    main()
