"""Sections of :mod:`profiles.schema` about training: optimisation, evaluation, snapshots."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, field_validator

from profiles.declarations import OptionError, Section, invalid_choice, option

WHISPER = "whisper"

OPTIMIZERS = ("adamw", "sgd", "muon", "adafactor")
"""Built-in optimizers."""


def _integral(steps: float) -> float:
    return int(steps) if steps == int(steps) else steps


StepsOrShare = Annotated[float, AfterValidator(_integral), PlainSerializer(_integral)]
"""Serialised as an integer if it is one, so that documents keep their format."""

_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
_TIME = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_SECONDS)})")
_MOST_SECONDS = 7 * 86_400.0
_EARLIER_INTERVAL, _SHARE, _LEAST_SECONDS = 200, 0.1, 5.0


def _steps_or_time(value: Any) -> int | str:
    text = str(value).strip().lower()
    if not isinstance(value, bool) and text.isdecimal():
        return int(text)
    if (time := _TIME.fullmatch(text)) and 1 <= float(time[1]) * _SECONDS[time[2]] <= _MOST_SECONDS:
        return f"{time[1]}{time[2]}"
    raise OptionError("snapshot_interval", "neither a time of a second to a week, such as 5m, 90s or 1h, nor steps")


IntervalOrShare = Annotated[float, AfterValidator(_integral), PlainSerializer(_integral, return_type=Any)]
"""Also in JSON an integer if it is one: plans of earlier versions, in which it always was, keep their hashes."""


class TrainingSettings(Section):
    """The optimisation."""

    learning_rate: float = option(1e-4, "peak learning rate at the reference batch", gt=0, le=10, usual=0.1)
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = option(
        "linear", "how the learning rate falls after the warm-up; wsd: constant, then a fall at the end"
    )
    lr_decay_share: float = option(
        0.2, "with lr_schedule = wsd: share of the run in which the learning rate falls", gt=0, le=1, advanced=True
    )
    warmup_steps: StepsOrShare = option(
        50,
        "steps of linear warm-up; below 1: a share of the run, so 0.1 is its first tenth",
        unit="steps",
        ge=0,
        le=10_000_000,
    )
    lr_scaling: Literal["auto", "off", "sqrt", "linear"] = option(
        "auto",
        "how the learning rate follows the global batch, relative to one worker's batch; auto: sqrt, but off where "
        "weights are merged and the model is new (sparta: always), as each machine steps on its own part",
        advanced=True,
    )
    epochs: float = option(3.0, "passes over the training data", unit="epochs", gt=0, le=10_000, usual=500)
    max_steps: int = option(
        0, "how many steps to train; 0: use 'epochs'", unit="steps", ge=0, le=10_000_000, usual=500_000
    )
    batch_size: int = option(8, "samples in one forward pass of one device", unit="samples", ge=1, le=65536, usual=1024)
    gradient_accumulation: int = option(
        1, "forward and backward passes for one optimizer step", ge=1, le=65536, usual=256
    )
    drop_last: bool = option(
        False, "leave out the last step of an epoch where it would be smaller than the others", advanced=True
    )
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: off", ge=0)
    ema: float = option(0.0, "decay of a moving average of the weights, which is saved, as 0.999; 0: none", ge=0, lt=1)
    ema_evaluated: bool = option(True, "evaluate the moving average, too; else the weights themselves", advanced=True)
    optimizer: str = option(
        "adamw",
        f"{', '.join(OPTIMIZERS)}, or file.py:function of your own, which returns a torch optimizer",
        kind="location",
    )
    weight_decay: float = option(0.01, "weight decay (not on biases and norms)", ge=0, le=100, usual=1)
    adam_beta2: float = option(0.999, "AdamW second moment decay", gt=0, lt=1, advanced=True)
    momentum: float = option(
        -1.0, "momentum of sgd and muon; -1: the usual one, 0.9 and 0.95", ge=-1, lt=1, advanced=True
    )
    mixed_precision: Literal["off", "bf16", "fp16", "auto"] = option(
        "auto", "auto: bf16 on CUDA that has it, on MPS where it is faster, for Whisper on CPUs too; else off"
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto", "compile the model's blocks (torch.compile); auto: on CUDA, where a run has 500 steps or more"
    )
    seed: int = option(
        42,
        "seed of weights, order and augmentation; for the same run again on several machines also balance = off",
        ge=0,
        lt=2**32,
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "device of the workers")
    threads: int = option(0, "CPU threads of a worker; 0: cores divided by the local workers", ge=0, advanced=True)

    @property
    def user_optimizer(self) -> str:
        """User function that makes the optimizer; empty: a built-in one."""
        return "" if self.optimizer in OPTIMIZERS else self.optimizer

    @field_validator("optimizer")
    @classmethod
    def _known_optimizer(cls, optimizer: str) -> str:
        file, _, function = optimizer.rpartition(":")
        if optimizer in OPTIMIZERS or (file.endswith(".py") and function.isidentifier()):
            return optimizer
        problem = invalid_choice(optimizer, OPTIMIZERS)
        raise OptionError("optimizer", f"{problem} (one of {', '.join(OPTIMIZERS)}, or file.py:function)")


class EvaluationSettings(Section):
    """Evaluation and early stopping."""

    eval_interval: IntervalOrShare = option(
        200,
        "evaluate every N steps; below 1: a share of the run, so 0.25 is in each quarter; 0: only before and after",
        unit="steps",
        ge=0,
    )
    eval_batch_size: int = option(0, "samples in one evaluation pass; 0: batch_size", unit="samples", ge=0, le=65536)
    eval_generate: bool = option(True, "generate text and measure WER and CER, not only the loss", tasks=(WHISPER,))
    eval_max_new_tokens: int = option(
        0,
        "most tokens in a generated text; 0: follows the longest transcript",
        unit="tokens",
        advanced=True,
        tasks=(WHISPER,),
        ge=0,
    )
    eval_before: bool = option(True, "evaluate before the first step, to compare with")
    eval_local: Literal["auto", "on", "off"] = option(
        "auto",
        "each worker also evaluates its own weights on the whole split, just before they are averaged; "
        "auto: with strategies that keep them apart",
        advanced=True,
    )
    eval_showcase: bool = option(
        True, "keep a few held-out samples, before and after training, to be shown", advanced=True
    )
    early_stopping_patience: int = option(0, "stop after N evaluations without a better result; 0: off", ge=0)
    early_stopping_min_delta: float = option(0.0, "smallest improvement that counts as better", ge=0, advanced=True)

    def interval_in(self, steps: int) -> int:
        """Return the steps between two evaluations of a run of so many ``steps``; 0: there are none in between."""
        is_share = 0 < self.eval_interval < 1
        return max(1, round(self.eval_interval * steps)) if is_share else int(self.eval_interval)

    @field_validator("eval_local", mode="before")
    @classmethod
    def _was_a_flag(cls, value: Any) -> Any:
        return {"true": "on", "false": "off"}.get(str(value).lower(), value)


class SnapshotSettings(Section):
    """Snapshots to resume from."""

    snapshot_interval: Annotated[int | str, BeforeValidator(_steps_or_time)] = option(
        "5m",
        "write a snapshot at least so often: 5m, 90s, 1h; in shorter runs about ten times in all. A number: after so "
        "many steps; 0: only when stopped",
    )
    snapshot_keep: int = option(
        2, "how many snapshots to keep; with several workers at least 2, and 1 more until the next one", ge=1
    )

    @property
    def steps(self) -> int:
        """Steps between two snapshots; 0: they follow time, or there are none."""
        return self.snapshot_interval if isinstance(self.snapshot_interval, int) else 0

    @property
    def seconds(self) -> float:
        """Most seconds between two snapshots; 0: they follow steps, or there are none."""
        time = _TIME.fullmatch(str(self.snapshot_interval))
        return float(time[1]) * _SECONDS[time[2]] if time else 0.0

    def seconds_in(self, run_seconds: float) -> float:
        """Return the seconds between two snapshots that follow time, in a run of about ``run_seconds``."""
        return min(self.seconds, max(_SHARE * run_seconds, _LEAST_SECONDS))

    @property
    def counted(self) -> SnapshotSettings:
        """As hashes of plans have them: the default is that of now, also where a plan has the one of before."""
        is_earlier = self.snapshot_interval == _EARLIER_INTERVAL
        return SnapshotSettings(snapshot_keep=self.snapshot_keep) if is_earlier else self
