"""What a run with the values of Job will be: what it trains on and for how long, what it measures, what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from textual.content import Content

from app.shell.text import literal, muted
from app.wizard.state.records import UNSETTLED, ItemStatus
from app.wizard.state.state import WizardState
from profiles.errors import counted
from profiles.quantities import duration_text, memory_text
from training.numerics.schedule import run_steps

_LABEL = 12


def steps_of(state: WizardState) -> tuple[int, int]:
    """Return the optimizer steps of the epochs and the samples of each, for the selected machines; 0: not known, or the
    job has a number of steps of its own."""
    values = {row.name: row.value for row in state.job.value.options if not row.problem}
    samples = int(values.get("max_train_samples") or 0) or state.data.value.samples
    samples = min(samples, state.data.value.samples)
    try:
        epochs, batch = float(values["epochs"]), int(values["batch_size"])
        batch *= int(values.get("gradient_accumulation") or 1) * len(state.members)
    except (KeyError, ValueError):  # such as ``auto``
        return 0, 0
    if not samples or not batch or int(values.get("max_steps") or 0):
        return 0, 0
    return run_steps(samples, batch, epochs).steps, batch


def run_preview(state: WizardState) -> Sequence[Content]:
    """Return the lines of the preview; empty while the data set is not read, or cannot be used."""
    if state.data.status in (*UNSETTLED, ItemStatus.FAILED):
        return ()
    lines = [Content.assemble(muted(label.ljust(_LABEL)), literal(text)) for label, text in _facts(state) if text]
    return [muted("The run with these values"), Content(""), *lines] if lines else ()


def _facts(state: WizardState) -> Iterator[tuple[str, str]]:
    data, values = state.data.value, {row.name: row.value for row in state.job.value.options}
    splits = dict(data.splits)
    if "train" in splits:
        hours = f", {duration_text(data.hours * 3600)} of sound" if data.hours else ""
        yield "trains on", f"{counted(splits['train'], 'sample')}{hours}"
    yield "such as", "   ".join(f'"{" ".join(text.split())}"' for text in data.examples)
    steps, batch = steps_of(state)
    if steps:
        yield "steps", f"about {steps:,}, of {counted(batch, 'sample')} on {counted(len(state.members), 'machine')}"
    most = int(values.get("max_eval_samples") or 0)
    held_out = [_part(count, most, split) for split, count in splits.items() if split != "train" and count]
    yield (
        "measures",
        f"before and after, on {' and '.join(held_out)} samples, which are not trained on" if held_out else "",
    )
    sizes = [
        (row.name, memory_text(row.needed), memory_text(row.free))
        for row in state.fits.value
        if row.needed and row.free
    ]
    yield "memory", "   ".join(f"{name} {needed} of {free} free" for name, needed, free in sizes)


def _part(count: int, most: int, split: str) -> str:
    return f"{most:,} of the {count:,} {split}" if 0 < most < count else f"{count:,} {split}"
