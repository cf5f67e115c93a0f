"""Measures this machine's device in minutes, as a report that the user can send in.

The sections are independent: one that fails becomes a row of the report with its error.
"""

from __future__ import annotations

import functools
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from profiles.files.resolve import profile_from_options
from profiles.quantities import bytes_text, flops_text, loss_text, memory_text, time_text
from training.exchange.base import SoloExchange
from training.exchange.codecs import codec_by_name
from training.hardware.device import select_device
from training.hardware.device_probe import (
    FOR_PROCESSORS,
    USUAL,
    ProbeSize,
    ProbeSteps,
    copy_speeds,
    product_speed,
    wait_for,
)
from training.layouts.inside.checks import INSIDE_LAYOUTS
from training.layouts.stages.probe import probe
from training.loop.trainer import Trainer
from training.run.local_plan import plan_local_run
from training.run.orders import Control
from training.tasks.custom import CustomJob, CustomTask

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CODECS = ("fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.05", "topk2bit:0.03")
_CLOSE = 0.02
"""Tolerance of a loss after some steps, relative to that of the processor in fp32."""


class SelfTestRow(NamedTuple):
    """One line of the report."""

    what: str
    result: str
    ok: bool = True


def self_test(
    device_name: str = "auto",
    steps: int = 20,
    size: ProbeSize | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[SelfTestRow]:
    """Measure the device for ``auto``, ``cpu``, ``cuda`` or ``mps``; ``tell`` is called with each row.

    Args:
        size: ``None``: one that takes about a minute on a device of this kind.

    Raises:
        BadInput: there is no such device here.
    """
    device = select_device(device_name)
    size = size or (FOR_PROCESSORS if device.type == "cpu" else USUAL)
    rows = []
    for section in (_facts, _products, _copies, _steps, _codecs, _layouts, _core):
        try:
            for row in section(device, steps, size):
                rows.append(row)
                tell(f"{row.what}: {row.result}")
        except Exception as error:  # noqa: BLE001 - what a back end raises is what the report is for
            message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            rows.append(SelfTestRow(section.__name__.strip("_"), message, ok=False))
            tell(f"{rows[-1].what}: {message}")
    return rows


def report(rows: list[SelfTestRow]) -> str:
    """Return the rows as Markdown, to be sent in."""
    lines = ["# Self-test", "", "| what | result | |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.result.replace('|', '/')} | {'ok' if row.ok else '**failed**'} |" for row in rows]
    return "\n".join([*lines, ""])


def _facts(device: torch.device, steps: int, size: ProbeSize) -> Iterator[SelfTestRow]:
    yield SelfTestRow("system", f"{platform.platform()}, {platform.machine()}")
    yield SelfTestRow("versions", f"Python {platform.python_version()}, torch {torch.__version__}")
    name = platform.processor() or "processor"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, {memory_text(properties.total_memory)}"
    elif device.type == "mps":
        name = f"{platform.processor()}, {memory_text(torch.mps.recommended_max_memory())} for the GPU"
    yield SelfTestRow("device", f"{device.type}: {name}; {torch.get_num_threads()} threads")


def _products(device: torch.device, steps: int, size: ProbeSize) -> Iterator[SelfTestRow]:
    for name, dtype in PRECISIONS.items():
        try:
            speed = product_speed(device, dtype or torch.float32, size, max(1, steps // 2))
        except (RuntimeError, TypeError) as error:
            yield SelfTestRow(f"products in {name}", " ".join(str(error).split())[:200], ok=False)
        else:
            yield SelfTestRow(f"products in {name}", flops_text(speed))


def _copies(device: torch.device, steps: int, size: ProbeSize) -> Iterator[SelfTestRow]:
    for name, speed in copy_speeds(device, size).items():
        yield SelfTestRow(f"copies {name}", f"{bytes_text(speed)}/s")


def _steps(device: torch.device, steps: int, size: ProbeSize) -> Iterator[SelfTestRow]:
    """Train the small model in each precision, without a loss scale, and compare with the loss of the processor."""
    expected = ProbeSteps(torch.device("cpu"), None, size).take(steps).loss
    for name, dtype in PRECISIONS.items():
        try:
            timed = ProbeSteps(device, dtype, size).take(steps)
        except (RuntimeError, TypeError) as error:
            yield SelfTestRow(f"steps in {name}", " ".join(str(error).split())[:200], ok=False)
            continue
        close = timed.is_finite and abs(timed.loss - expected) <= _CLOSE * abs(expected)
        losses = f"loss {loss_text(timed.loss)} after {steps + 1} steps, {loss_text(expected)} on the processor"
        yield SelfTestRow(f"steps in {name}", f"{time_text(timed.seconds)} a step, {losses}", close)


def _codecs(device: torch.device, steps: int, size: ProbeSize) -> Iterator[SelfTestRow]:
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(0))
    equal = [name for name in CODECS if torch.equal(*_encoded(name, values, device))]
    differ = [name for name in CODECS if name not in equal]
    result = (
        f"other bytes than on the processor: {', '.join(differ)}" if differ else "the same bytes as on the processor"
    )
    yield SelfTestRow("codecs", result, not differ)


def _encoded(name: str, values: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    codec = codec_by_name(name)
    return codec.encode(values.to(device)).cpu(), codec.encode(values)


def _layouts(device: torch.device, steps: int, size: ProbeSize) -> Iterator[SelfTestRow]:
    """Train a small Llama in the three stages of a pipeline, all on this device, and compare with one stage."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds
    except ImportError:
        yield SelfTestRow("layout pipeline", "not tried: transformers is not installed")
    else:
        probe(LlamaForCausalLM, LlamaConfig(num_hidden_layers=6), (0, 2, 4, 6), str(device))
        yield SelfTestRow("layout pipeline", "loss and gradients of three stages are those of one, bit for bit")
    gpus = torch.cuda.device_count()
    for layout in INSIDE_LAYOUTS:
        needs = f"it needs two GPUs in this machine, which has {gpus}"
        by_hand = f"muster train PROFILE --local {gpus} --layout {layout}"
        yield SelfTestRow(f"layout {layout}", f"not tried: {needs if gpus < 2 else by_hand}")


def _core(device: torch.device, steps: int, size: ProbeSize) -> Iterator[SelfTestRow]:
    """Train through the core as a run does, with a snapshot."""
    options = {"task": "custom", "model_path": "self_test:job", "device": device.type, "max_steps": 10 * steps}
    options |= {"batch_size": size.batch, "snapshot_interval": 0, "eval_interval": 0}
    profile = profile_from_options("self-test", options)
    task = CustomTask(profile, functools.partial(_job, size))
    task.prepare(lambda phase, done, total: None)
    task.device = device
    with tempfile.TemporaryDirectory(prefix="muster-self-test-") as folder:
        trainer = Trainer(
            plan_local_run(profile, 1), 0, task, SoloExchange(), lambda event: None, Control(), Path(folder)
        )
        try:
            yield from _core_rows(trainer, steps)
        finally:
            with suppress(AttributeError):  # it may have failed before there was one
                trainer.source.close()
            trainer.writer.close()  # which writes into the folder


def _core_rows(trainer: Trainer, steps: int) -> Iterator[SelfTestRow]:
    trainer._set_up()
    trainer._take_starting_state()
    kind = next((name for name in ("fused", "foreach") if trainer.optimizer.defaults.get(name)), "chosen by torch")
    trainer._step()
    wait_for(trainer.device)
    start = time.perf_counter()
    for _ in range(steps):
        trainer._step()
    wait_for(trainer.device)
    taken = (time.perf_counter() - start) / steps
    chosen = f"mixed_precision = auto is {trainer.precision.name}, AdamW is {kind}"
    yield SelfTestRow("steps of the core", f"{time_text(taken)} a step; {chosen}")
    start = time.perf_counter()
    trainer._snapshot()
    yield SelfTestRow("snapshot", time_text(time.perf_counter() - start))
    trainer.writer.wait()


class _Blocks(nn.Module):
    """The probe's model as a job: the loss of reproducing its inputs."""

    def __init__(self, size: ProbeSize) -> None:
        super().__init__()
        self.blocks = ProbeSteps(torch.device("cpu"), None, size).model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.blocks(inputs).float(), inputs)


def _job(size: ProbeSize) -> CustomJob:
    data: Any = list(torch.randn(8 * size.batch, size.length, size.width, generator=torch.Generator().manual_seed(1)))
    return CustomJob(_Blocks(size), data)
