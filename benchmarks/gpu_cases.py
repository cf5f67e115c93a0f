"""The cases of ``gpu_session.py``, each by its name; prints a JSON object a line.

.venv/bin/python benchmarks/gpu_cases.py gpt muster --device cuda [--tiny]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch
from torch import nn

from profiles.files.resolve import profile_from_options
from training.exchange.base import SoloExchange
from training.hardware.device import select_device
from training.hardware.device_probe import TINY, USUAL, copy_speeds, product_speed, wait_for
from training.loop.trainer import Trainer
from training.records.events import Event, StepEvent
from training.run.local_plan import plan_local_run
from training.run.orders import Control
from training.tasks.custom import CustomJob, CustomTask

Results = Iterator[dict[str, Any]]
CACHE = Path(tempfile.gettempdir(), "muster-gpu-session")
"""Features, which the cases share: they cost no device time twice."""
MINI = {"d_model": 16, "heads": 2, "ffn_dim": 32, "layers": 2}


class Setting(NamedTuple):
    """Where cases run, and how large."""

    device: torch.device
    tiny: bool

    @property
    def warm(self) -> int:
        return 1 if self.tiny else 10

    @property
    def steps(self) -> int:
        return 1 if self.tiny else 30

    @property
    def half(self) -> bool:
        return self.device.type == "cuda"


def ceilings(setting: Setting) -> Results:
    """What the device can do at most: the denominators."""
    size = TINY if setting.tiny else USUAL._replace(matrix=8192)
    for dtype in (torch.bfloat16, torch.float32):
        yield {"product": str(dtype), "TFLOP/s": product_speed(setting.device, dtype, size) / 1e12}
    yield {f"{name}, GB/s": speed / 1e9 for name, speed in copy_speeds(setting.device, size).items()}


# --------------------------------------------------------------------------------------------------------------- GPT


class Gpt(nn.Module):
    """GPT-2 with random weights; gives its loss."""

    def __init__(self, tiny: bool) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes = (257, 16, 2, 2, 32) if tiny else (50304, 768, 12, 12, 1024)
        config = GPT2Config(**dict(zip(("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"), sizes)))
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        config.use_cache = False
        torch.manual_seed(0)
        self.gpt: Any = GPT2LMHeadModel(config)

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return self.gpt(input_ids=input_ids, labels=input_ids).loss


def texts(tiny: bool, count: int) -> list[torch.Tensor]:
    length, words = (32, 257) if tiny else (1024, 50304)
    return list(torch.randint(0, words, (count, length), generator=torch.Generator().manual_seed(0)))


def gpt_options(setting: Setting, **more: Any) -> dict[str, Any]:
    options = {"task": "custom", "model_path": "gpu_cases:job", "device": setting.device.type, "batch_size": 16}
    options |= {"max_steps": 10_000, "snapshot_interval": 0, "eval_interval": 0}
    return options | {"mixed_precision": "bf16" if setting.half else "off"} | more


@contextlib.contextmanager
def trainer_of(task: Any, setting: Setting, note: Callable[[Event], None] = lambda event: None) -> Iterator[Trainer]:
    """Yield a trainer of the core that stands before its first step."""
    task.device = setting.device
    task.prepare(lambda phase, done, total: None)
    with tempfile.TemporaryDirectory(prefix="muster-gpu-") as folder:
        plan = plan_local_run(task.profile, 1)
        trainer = Trainer(plan, 0, task, SoloExchange(), note, Control(), Path(folder))
        trainer._set_up()
        trainer._take_starting_state()
        try:
            yield trainer
        finally:
            trainer.source.close()
            trainer.writer.close()


def gpt_trainer(setting: Setting, **more: Any) -> contextlib.AbstractContextManager[Trainer]:
    job = CustomJob(Gpt(setting.tiny), texts(setting.tiny, 256))
    return trainer_of(CustomTask(profile_from_options("gpt", gpt_options(setting, **more)), lambda: job), setting)


def timed(step: Callable[[], Any], setting: Setting) -> float:
    """Return seconds of a step, over all but the first ones; the device's work is waited for at both ends only."""
    for _ in range(setting.warm):
        step()
    wait_for(setting.device)
    start = time.perf_counter()
    for _ in range(setting.steps):
        step()
    wait_for(setting.device)
    return (time.perf_counter() - start) / setting.steps


def gpt(setting: Setting, way: str) -> Results:
    """Tokens/s of GPT-2 124M, 16 texts of 1,024 tokens: the core, a loop like nanoGPT's, and transformers' Trainer."""
    kind, _, compiled = way.partition(" ")
    if setting.half:
        torch.cuda.reset_peak_memory_stats()
    if kind == "muster":
        with gpt_trainer(setting, compile="on" if compiled else "off") as trainer:
            seconds = timed(trainer._step, setting)
            weights = sum(parameter.numel() for parameter in trainer.parameters)
    else:
        model = Gpt(setting.tiny).to(setting.device)
        weights = sum(parameter.numel() for parameter in model.parameters())
        seconds = bare(model, setting, bool(compiled)) if kind == "bare" else hf_trainer(model, setting)
    tokens = 16 * len(texts(setting.tiny, 1)[0]) / seconds
    peak = {"peak GB": torch.cuda.max_memory_allocated() / 2**30} if setting.half else {}
    yield {"ms a step": 1000 * seconds, "tokens/s": tokens, "TFLOP/s": 6 * weights * tokens / 1e12, **peak}


def bare(model: nn.Module, setting: Setting, compiled: bool) -> float:
    """Return seconds of a step of the loop that nanoGPT has."""
    forward: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=setting.device.type != "mps")
    data = texts(setting.tiny, 256)
    batches = [torch.stack(data[at : at + 16]) for at in range(0, 256, 16)]
    count = iter(range(10**9))

    def step() -> None:
        batch = batches[next(count) % len(batches)]
        batch = batch.pin_memory().to(setting.device, non_blocking=True) if setting.half else batch.to(setting.device)
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=setting.half):
            loss = forward(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, setting)


def hf_trainer(model: nn.Module, setting: Setting) -> float:
    """Return seconds of a step of ``transformers.Trainer`` with its defaults."""
    from transformers import Trainer as Theirs
    from transformers import TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        times: list[float] = []  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (setting.warm, setting.warm + setting.steps):
                wait_for(setting.device)
                self.times.append(time.perf_counter())

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(input_ids)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=16, max_steps=setting.warm + setting.steps, report_to=[],
            bf16=setting.half, use_cpu=setting.device.type == "cpu", save_strategy="no", logging_strategy="no",
            remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        data: Any = [{"input_ids": text} for text in texts(setting.tiny, 256)] * 4
        Theirs(model=Loss(), args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    return (Clock.times[1] - Clock.times[0]) / setting.steps


def profile(setting: Setting) -> Results:
    """How much of the time the device works, and how often the host waits for it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with gpt_trainer(setting, compile="off") as trainer:
        timed(trainer._step, setting)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.half else [])]
        count = 1 if setting.tiny else 5
        start = time.perf_counter()
        with profiler(activities=kinds) as seen:
            for _ in range(count):
                trainer._step()
            wait_for(setting.device)
        seconds = time.perf_counter() - start
    events = seen.key_averages()
    calls = {event.key: event.count / count for event in events if event.key.startswith("cuda")}
    busy = sum(event.self_device_time_total for event in events) / 1e6
    yield {"device busy": busy / seconds, "ms a step": 1000 * seconds / count, **calls}


def snapshot(setting: Setting) -> Results:
    """How long a snapshot of GPT-2 124M with its optimizer stops the steps."""
    with gpt_trainer(setting) as trainer:
        trainer._step()
        wait_for(setting.device)
        start = time.perf_counter()
        trainer._snapshot()
        yield {"seconds until the next step": time.perf_counter() - start}


def loader(setting: Setting) -> Results:
    """Samples/s where one costs 10 ms of the processor: the loader is the brake, not the device."""

    class Slow:
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            end = time.thread_time() + (0.0001 if setting.tiny else 0.01)
            while time.thread_time() < end:
                torch.ones(1000).sum()
            return torch.full((64,), float(index % 7)), torch.tensor([1.0])

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    job = CustomJob(model, Slow(), loss=nn.functional.mse_loss)
    options = gpt_options(setting, batch_size=4 if setting.tiny else 64, mixed_precision="off")
    with trainer_of(CustomTask(profile_from_options("loader", options), lambda: job), setting) as trainer:
        few = setting._replace(tiny=True)
        yield {"samples/s": options["batch_size"] / timed(trainer._step, few)}


# ----------------------------------------------------------------------------------------------------------- Whisper


@contextlib.contextmanager
def whisper_folder(shape: str, tiny: bool) -> Iterator[Path]:
    """Yield the folder of a Whisper of a published shape with random weights: windows of 30 s, a small vocabulary."""
    import whisper_memory

    kind = ROOT / "examples" / ("tiny_whisper" if tiny else "scratch_whisper")
    with tempfile.TemporaryDirectory(prefix="muster-gpu-") as temporary:
        base, made = Path(temporary, "base"), Path(temporary, "model")
        shutil.copytree(kind, base)
        made.mkdir()
        if not tiny:  # as published ones hear
            _change(base / "config.json", max_source_positions=1500, max_target_positions=448)
            _change(base / "preprocessor_config.json", hop_length=160, n_fft=400, nb_max_frames=3000)
        whisper_memory.SHAPES["mini"] = MINI
        yield whisper_memory.shaped(base, "mini" if tiny else shape, made)


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def whisper(setting: Setting, shape: str, kind: str) -> Results:
    """Samples/s beside ``Seq2SeqTrainer``, turn by turn: ``full``, ``lora``, ``augmented``."""
    import whisper_speed as speed

    ways: dict[str, dict[str, Any]] = {"full windows": {}, "auto windows": speed.AUTO}
    if kind == "augmented":
        ways |= {f"{name}, augmentation 0.5": {**options, "augmentation": 0.5} for name, options in ways.items()}
    model = speed.LORA if kind == "lora" else {"tuning": "full"}
    batch = 2 if setting.tiny else 8 if kind == "lora" else 16
    rounds = 1 if setting.tiny else 8
    with whisper_folder(shape, setting.tiny) as folder:
        chosen = speed.Case(kind, batch, {**model, "language": "en"}, ways, clips=32 if setting.tiny else 0)
        yield from speed.measure(str(folder), chosen, rounds, str(CACHE), time.perf_counter, setting.device.type)


def whisper_options(setting: Setting, folder: Path, **more: Any) -> dict[str, Any]:
    options = {"model_path": str(folder), "dataset_path": str(ROOT / "examples" / "spoken_commands")}
    options |= {"language": "en", "device": setting.device.type, "max_steps": 100, "max_train_samples": 64}
    options |= {"mixed_precision": "bf16", "eval_interval": 0, "snapshot_interval": 0, "cache_dir": str(CACHE)}
    return options | more


def memory(setting: Setting, shape: str, tuning: str, base: str) -> Results:
    """Peak of a step with one full window, beside what the memory model says."""
    import whisper_memory

    from distributed.planning.memory.memory_model import need_of
    from training.tasks.registry import size_for

    with whisper_folder(shape, setting.tiny) as folder:
        more = {"tuning": tuning, "base_precision": base, "batch_size": 1, "window": "full"}
        chosen = profile_from_options("memory", whisper_options(setting, folder, max_eval_samples=2, **more))
        size = size_for(chosen)
        assert size is not None
        predicted = need_of(chosen, size, alone=True, on_gpu=setting.half, bf16=True).total
        measured = whisper_memory.measure(chosen)["training"]
        yield {"predicted GB": predicted / 2**30, "measured GB": measured / 2**30, "ratio": predicted / measured}


def evaluation(setting: Setting, size: str) -> Results:
    """Seconds that 1,000 clips would take, by so many at once."""
    from speech.whisper.task import WhisperTask

    count = 4 if setting.tiny else 256
    with whisper_folder("small", setting.tiny) as folder:
        more = {"eval_batch_size": size, "max_eval_samples": count, "eval_max_new_tokens": 40}
        task = WhisperTask(profile_from_options("evaluation", whisper_options(setting, folder, **more)))
        with trainer_of(task, setting) as trainer:
            event = trainer.evaluator.evaluate("validation", 0, {0: int(size)})
            assert event is not None
            yield {"clips": event.samples, "s for 1,000": 1000 * event.seconds / max(1, event.samples)}


def members(setting: Setting, strategy: str) -> Results:
    """Steps of two members that share the device, over the mesh on loopback."""
    from local_runs import train

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples" / "nanogpt" / "model", folder, dirs_exist_ok=True)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2} if setting.tiny else {"n_embd": 768, "n_layer": 12}
        _change(Path(folder, "config.json"), **sizes, n_positions=256 if setting.tiny else 1024)
        steps, sync = (4, 2) if setting.tiny else (24, 10)
        options = {"model_path": folder, "strategy": strategy, "max_steps": steps, "eval_interval": 0}
        options |= {"eval_before": "false", "max_eval_samples": 2, "snapshot_interval": 0, "batch_size": 8}
        options |= {"block_size": 32 if setting.tiny else 1024, "device": setting.device.type}
        options |= {"diloco.sync_interval": sync} if strategy == "diloco" else {}
        done = train("nanogpt", 2, options)
    seconds: list[StepEvent] = done.steps(0)[2:]
    syncs = [1000 * event.seconds for event in done.syncs(0)]
    yield {
        "ms a step": 1000 * statistics.median(event.compute + event.wait for event in seconds),
        "of it waiting": 1000 * statistics.median(event.wait for event in seconds),
        "ms an exchange": statistics.median(syncs) if syncs else None,
        "MB a step": sum(event.bytes_sent for event in seconds) / 1e6 / len(seconds),
    }


CASES: dict[str, Callable[..., Results]] = {
    function.__name__: function
    for function in (ceilings, gpt, profile, snapshot, loader, whisper, memory, evaluation, members)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("options", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    setting = Setting(select_device(arguments.device), arguments.tiny)
    for result in CASES[arguments.case](setting, *arguments.options):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
