"""The same trainings here and with ExoGym: loss at the end, and bytes that a member gives to its exchanges.

    .venv/bin/python benchmarks/beside_exogym.py --exogym CHECKOUT --python VENV/bin/python --work FOLDER
        [--settings language digits] [--only NAME ...] [--seeds 1 2 3] [--table]

ExoGym is a clone of github.com/exo-explore/gym; its Python needs torch, numpy, einops, tqdm, psutil, greenlet and
scikit-learn.
Both train the same model from the same first weights, with the same samples for each of four members in each step and
the same learning rate. ``language`` follows ExoGym's example ``nanogpt_train.py`` on Shakespeare, ``digits`` its
``mnist.py``; SETTINGS says what is smaller, so that a run takes minutes of one core. Both end with the mean of the
members' weights, whose loss is computed here. A run that is in FOLDER/results.json is not done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exogym_side import Digits, Language, Rows, Windows

from training.data.sample_order import Cursor, SampleSchedule
from training.local_trainer import LocalTrainer
from training.numerics.schedule import learning_rate_at
from training.records.events import Event, StepEvent

TEXT = Path(__file__).resolve().parent.parent / "examples/nanogpt/input.txt"
MEMBERS, SHARE, RESULTS = 4, 0.005, "results.json"
_DIGITS = "import sys,sklearn.datasets as d; x, y = d.load_digits(return_X_y=True); print(x.tolist(), '|', y.tolist())"


@dataclass(frozen=True)
class Setting:
    """What both train."""

    model: Callable[[], nn.Module]
    train: Rows
    validation: Rows
    job: dict[str, Any]
    """What the other side makes its model of."""
    rate: float
    schedule: str
    warm_up: int
    batch: int
    steps: int
    interval: int
    decay: float
    norm: float


def language(python: Path) -> Setting:
    """There: a context of 1024 characters, 5000 steps, 1000 of them warm-up, an exchange of DiLoCo every 200."""
    data, context = TEXT.read_text(), 32
    number = {character: index for index, character in enumerate(sorted(set(data)))}
    tokens = torch.tensor([number[character] for character in data])
    end, model = int(0.9 * len(tokens)), {"kind": "language", "characters": len(number), "context": context}
    held_out = Windows(tokens[end:], context)
    blocks = torch.stack([held_out[start] for start in range(0, len(held_out), context)])
    train = Windows(tokens[:end], context)
    make = lambda: Language(len(number), context)  # noqa: E731
    return Setting(make, train, Rows(blocks), model, 1e-3, "constant", 20, 8, 100, 4, 0.01, 1.0)


def digits(python: Path) -> Setting:
    """There: MNIST, turned and shifted at random, 256 in a batch."""
    said = subprocess.run([python, "-c", _DIGITS], check=True, capture_output=True, text=True).stdout
    images, labels = (torch.tensor(json.loads(part)) for part in said.split("|"))
    rows = torch.cat([images / 16, labels[:, None]], 1)
    train, validation = Rows(rows[:1408]), Rows(rows[1408:])
    return Setting(Digits, train, validation, {"kind": "digits"}, 3e-4, "cosine", 100, 16, 150, 20, 1e-4, 0.0)


SETTINGS: dict[str, Callable[[Path], Setting]] = {"language": language, "digits": digits}
STRATEGIES = ("allreduce", "diloco", "sparta", "demo")
DEFAULTS, MENDED = "diloco, our outer rates", "diloco, mended there"


def ours(setting: Setting, name: str, seed: int, model: nn.Module) -> tuple[nn.Module, float]:
    """Return the trained model, and the bytes that a member gave to exchanges."""
    events: list[Event] = []
    strategy = name.partition(",")[0]
    options: dict[str, Any] = {"lr_scaling": "off", "threads": 1, "device": "cpu", "seed": seed}
    options |= {"learning_rate": setting.rate, "lr_schedule": setting.schedule, "warmup_steps": setting.warm_up}
    options |= {"batch_size": setting.batch, "max_steps": setting.steps, "weight_decay": setting.decay}
    options |= {"eval_interval": 0, "eval_before": False, "snapshot_interval": 0, "max_grad_norm": setting.norm}
    if strategy == "diloco":
        options["diloco.sync_interval"] = setting.interval
        options |= {} if name == DEFAULTS else {"diloco.outer_lr": 0.7, "diloco.outer_momentum": 0.9}
    elif strategy == "sparta":
        options["sparta.share"] = SHARE
    elif strategy == "demo":
        options |= {"max_grad_norm": 0.0, "weight_decay": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        trainer = LocalTrainer(model, setting.train, simulate=MEMBERS, output_dir=folder, on_event=events.append)
        trained = trainer.fit(strategy=strategy, **options)
    sent = sum(event.bytes_sent for event in events if isinstance(event, StepEvent)) / MEMBERS
    return trained, sent / (MEMBERS - 1 if strategy == "demo" else 2 * (MEMBERS - 1) / MEMBERS)


def theirs(setting: Setting, name: str, seed: int, model: nn.Module, exogym: Path, python: Path) -> tuple[Any, float]:
    """Return the same with ExoGym."""
    schedule = SampleSchedule(len(setting.train), seed, 1)
    cursor, sizes, rows = Cursor(), dict.fromkeys(range(MEMBERS), setting.batch), []
    for _ in range(setting.steps):
        slices = [schedule.step(cursor, sizes, rank)[0][0] for rank in range(MEMBERS)]
        cursor = schedule.after(cursor, sizes)
        rows += [setting.train[one] for together in zip(*slices, strict=True) for one in together]  # it deals them out
    course = [
        learning_rate_at(step, setting.steps, setting.warm_up, setting.schedule, 1.0) for step in range(setting.steps)
    ]
    job = setting.job | {
        "strategy": name.partition(",")[0],
        "apart": name == MENDED,
        "rows": torch.stack(rows),
        "rates": course,
        "first": model.state_dict(),
    }
    job |= {"members": MEMBERS, "share": SHARE, "interval": setting.interval, "rate": setting.rate}
    job |= {"batch": setting.batch, "steps": setting.steps, "decay": setting.decay, "norm": setting.norm}
    path = os.pathsep.join(map(str, (exogym, exogym / "example/nanogpt")))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(job, Path(folder) / "job.pt")
        script = Path(__file__).with_name("exogym_side.py")
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([python, script, folder], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"ExoGym ended with {done.returncode}: {done.stderr[-2000:]}")
        last = torch.load(Path(folder) / "last.pt")
    nn.Module.load_state_dict(model, last["state"], strict=False)
    return model, last["sent"]


def loss_of(model: nn.Module, rows: Rows) -> float:
    """Return the mean loss of the held-out samples."""
    model.eval()
    with torch.no_grad():
        batches = rows.rows.split(64)
        return sum(float(model(batch)) * len(batch) for batch in batches) / len(rows)


def table(results: dict[str, Any]) -> None:
    """Print Markdown: losses over seeds, and bytes for each weight and step."""
    print("| setting | strategy | seeds | loss here | loss there | bytes here | bytes there |\n|" + "---|" * 7)
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, one in results.items():
        setting, name, side, seed = key.split("/")
        found.setdefault((setting, name), {}).setdefault(side, {})[seed] = one
    for (setting, name), sides in found.items():
        cells = []
        for figure, form in (("loss", ".3f"), ("bytes", ".3g")):
            for side in ("ours", "theirs"):
                values = [one[figure] for one in sides.get(side, {}).values()]
                spread = f" ± {statistics.stdev(values):{form}}" if figure == "loss" and len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):{form}}{spread}" if values else "")
        print(f"| {setting} | {name} | {max(map(len, sides.values()))} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exogym", type=Path, help="checkout of ExoGym")
    parser.add_argument("--python", type=Path, help="interpreter with what ExoGym needs")
    parser.add_argument("--work", type=Path, default=Path("output/beside_exogym"))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--only", nargs="+", default=[*STRATEGIES, DEFAULTS, MENDED])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.exogym or not arguments.python:
        raise SystemExit("nothing to compare with: give --exogym CHECKOUT and --python VENV/bin/python")
    sys.path.append(str(arguments.exogym / "example/nanogpt"))
    file = arguments.work / RESULTS
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    wanted = itertools.product(arguments.seeds, arguments.settings, arguments.only, ("theirs", "ours"))
    for seed, chosen, name, side in [] if arguments.table else wanted:
        key = f"{chosen}/{name}/{side}/{seed}"
        absent = {("theirs", DEFAULTS), ("ours", MENDED)} | ({("theirs", "demo")} if chosen == "digits" else set())
        if key in results or (side, name) in absent:  # its DeMo takes no convolution
            continue
        setting = SETTINGS[chosen](arguments.python)
        torch.manual_seed(seed)
        model = setting.model()
        weights = sum(weight.numel() for weight in model.parameters())
        if side == "ours":
            model, sent = ours(setting, name, seed, model)
        else:
            model, sent = theirs(setting, name, seed, model, arguments.exogym.resolve(), arguments.python)
        results[key] = {"loss": loss_of(model, setting.validation), "bytes": sent / weights / setting.steps}
        arguments.work.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1))
        print(key, results[key], flush=True)
    table(results)


if __name__ == "__main__":
    main()
