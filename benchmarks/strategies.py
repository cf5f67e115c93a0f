"""What every strategy costs in loss, against averaging gradients in every step, at equal samples.

    .venv/bin/python benchmarks/strategies.py --work FOLDER [--only NAME ...] [--settings fine-tune scratch speech]
        [--seeds 1 2 3] [--steps 240] [--table]

Four members, simulated, of the small GPT of ``examples/nanogpt`` (0.9 million weights, bytes as tokens), batches of 4
blocks of 64 bytes for each, AdamW at 1e-3 (times what ``lr_scaling`` says), falling to 0 (the product's defaults).
The text is 2 MB of C headers (``/usr/include``). ``scratch`` begins with random weights; ``fine-tune`` with a model
that learnt 4 MB of the Python sources of this Python's standard library first. Validation: 300 pieces of 128 bytes
from the middle of headers that are not trained on. ``single`` is one of the machines alone, with as many steps.

``speech`` fine-tunes the small Whisper of ``demo-scratch`` (0.6 million weights), batches of 4 clips for each. It has
learnt ``examples/spoken_commands`` as espeak-ng's voices say them, and learns the clips of recorded people (flite,
festival, SVOX Pico). 240 of those are not trained on, and validate: loss and word error rate.

A run that is in FOLDER/results.json is not done again, and ``--table`` prints what is there as Markdown. Losses do not
depend on what else the machine does. About 40 seconds of one core a run.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from local_runs import train

from training.strategies.registry import strategy_class

MEMBERS, BATCH, BLOCK, RATE = 4, 4, 64, 1e-3
TRAINED, HELD_OUT, PIECE = 2_000_000, 300, 128
FIRST_STEPS = 1200
CLIPS = Path(__file__).resolve().parent.parent / "examples" / "spoken_commands"
SPEECH_RATE, CLIPS_HELD_OUT = 5e-4, 240
SETTINGS = ("fine-tune", "scratch", "speech")
RESULTS = "results.json"
LOCAL = {"eval_local": "on"}
"""Also evaluate what each member holds before the last mean."""


def cells(steps: int, setting: str) -> dict[str, dict[str, Any]]:
    """Return the options of every row, the most wanted first; a number after ``/`` is that of the exchanges. Rows that
    merge weights come again with the learning-rate rule that is not their default in this setting."""

    def rounds(strategy: str, count: int, **own: Any) -> dict[str, Any]:
        found = {f"{strategy}.{name}": value for name, value in own.items()}
        return {"strategy": strategy, f"{strategy}.sync_interval": max(1, steps // count), **found}

    paper, short = {"outer_lr": 0.7, "outer_momentum": 0.9}, {"outer_lr": 1.0, "outer_momentum": 0.5}
    soon, plain = {"sync_delay": 1}, {"sync_delay": 1, "mixing": 0}  # less overlap, and no own weights kept in a merge
    both = plain | short
    force = {"sparseloco.force": "true"}
    dgc = {"allreduce.compressor": "dgc", "optimizer": "sgd", "learning_rate": 0.1}
    found: dict[str, dict[str, Any]] = {
        "single": {"strategy": "allreduce"},
        "allreduce": {"strategy": "allreduce"},
        "allreduce, lr_scaling off": {"strategy": "allreduce", "lr_scaling": "off"},
        "diloco / 10": rounds("diloco", 10),
        "streaming_diloco / 10": rounds("streaming_diloco", 10),
        "streaming_diloco / 30": rounds("streaming_diloco", 30),
        "diloco, 1.0 and 0.5 / 10": rounds("diloco", 10, **short),
        "diloco, 0.7 and 0.9 / 10": rounds("diloco", 10, **paper),
        "sparta 0.5 %": {"strategy": "sparta", **LOCAL},
        "demo": {"strategy": "demo"},
        "sparseloco / 100": rounds("sparseloco", 100),
        "noloco / 10": rounds("noloco", 10) | LOCAL,
        "local_sgd / 10": rounds("local_sgd", 10),
        "allreduce, powersgd": {"strategy": "allreduce", "allreduce.compressor": "powersgd"},
        "sparta 5 %": {"strategy": "sparta", "sparta.share": 0.05, **LOCAL},
        "allreduce, sgd": {"strategy": "allreduce", "optimizer": "sgd", "learning_rate": 0.1},
        "allreduce, dgc": {"strategy": "allreduce", **dgc},
        "sparseloco, forced / 10": rounds("sparseloco", 10) | force,
        "fedavg, half of them / 10": rounds("fedavg", 10, fraction=0.5),
        "sparta + diloco / 10": rounds("diloco", 10) | {"strategy": "sparta + diloco", **LOCAL},
        "diloco, muon / 10": rounds("diloco", 10) | {"optimizer": "muon"},
        "allreduce, muon": {"strategy": "allreduce", "optimizer": "muon"},
        "streaming_diloco, rda / 10": rounds("streaming_diloco", 10, merge="rda"),
        "streaming_diloco, delay 0 / 10": rounds("streaming_diloco", 10, sync_delay=0),
        "streaming_diloco, delay 1 / 10": rounds("streaming_diloco", 10, **soon),
        "streaming_diloco, delay 1 and mixing 0 / 10": rounds("streaming_diloco", 10, **plain),
        "streaming_diloco, delay 1 / 30": rounds("streaming_diloco", 30, **soon),
        "streaming_diloco, delay 1 and mixing 0 / 30": rounds("streaming_diloco", 30, **plain),
        "streaming_diloco, delay 1, mixing 0, 1.0 and 0.5 / 10": rounds("streaming_diloco", 10, **both),
        "streaming_diloco, delay 1, mixing 0, 1.0 and 0.5 / 30": rounds("streaming_diloco", 30, **both),
        "streaming_diloco, 1.0 and 0.5 / 10": rounds("streaming_diloco", 10, **short),
        "diloco / 30": rounds("diloco", 30),
        "diloco, 1.0 and 0.5 / 30": rounds("diloco", 30, **short),
        "diloco, 0.7 and 0.9 / 30": rounds("diloco", 30, **paper),
        "streaming_diloco, 1.0 and 0.5 / 30": rounds("streaming_diloco", 30, **short),
        "streaming_diloco, 0.7 and 0.9 / 30": rounds("streaming_diloco", 30, **paper),
        "local_sgd / 30": rounds("local_sgd", 30),
        "noloco / 30": rounds("noloco", 30) | LOCAL,
        "async_diloco / 10": rounds("async_diloco", 10),
    }
    start, again = "scratch" if setting == "scratch" else "pretrained", {}
    for name, options in found.items():
        kind = strategy_class(options["strategy"])
        if kind.merges == "weights":
            rule = "off" if start in kind.scales_learning_rate else "sqrt"
            said, slash, exchanges = name.partition(" / ")
            again[f"{said}, lr_scaling {rule}{slash}{exchanges}"] = options | {"lr_scaling": rule}
    return found | again


# ---------------------------------------------------------------------------------------------------------------- texts


def texts(folder: Path, pattern: str) -> Iterator[str]:
    """Yield the texts of a folder's files, those of tests aside, always in the same order, which is no other order."""
    found = (path for path in folder.rglob(pattern) if path.is_file() and "test" not in str(path.relative_to(folder)))
    for path in sorted(found, key=lambda one: hashlib.sha1(str(one.relative_to(folder)).encode()).digest()):
        text = path.read_text(encoding="ascii", errors="ignore")
        if len(text) > 4 * PIECE:
            yield text


def write_texts(target: Path, folder: Path, pattern: str, length: int) -> None:
    """Write ``train.txt`` and ``validation.txt``; the files of the latter are not in the former."""
    target.mkdir(parents=True, exist_ok=True)
    found = texts(folder, pattern)
    pieces = [text[len(text) // 2 :][:PIECE] for _, text in zip(range(HELD_OUT), found, strict=False)]
    kept, size = [], 0
    for text in found:
        kept.append(text[:20_000])
        size += len(kept[-1])
        if size >= length:
            break
    if size < length:
        raise SystemExit(f"{folder} has less than {length} characters of {pattern}")
    (target / "train.txt").write_text("\n".join(kept))
    (target / "validation.txt").write_text("".join(pieces))


def make_texts(work: Path, headers: Path) -> None:
    """Make the texts, and the model that ``fine-tune`` begins with, where they are not there yet."""
    if not (work / "headers").exists():
        write_texts(work / "headers", headers, "*.h", TRAINED)
    model = work / "model"
    if not model.exists():
        write_texts(work / "python", Path(sysconfig.get_paths()["stdlib"]), "*.py", 2 * TRAINED)
        first = {"max_steps": FIRST_STEPS, "batch_size": MEMBERS * BATCH, "dataset_path": work / "python", "seed": 0}
        train("nanogpt", 1, common(work, "fine-tune") | first, model=model)


# --------------------------------------------------------------------------------------------------------------- speech


def write_clips(target: Path, split: str, clips: Sequence[dict[str, str]]) -> None:
    """Write the table of a split; the audio stays where it is."""
    target.mkdir(parents=True, exist_ok=True)
    with (target / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(clips[0]))
        writer.writeheader()
        writer.writerows(clip | {"audio_path": str(CLIPS / clip["audio_path"])} for clip in clips)


def make_voices(work: Path) -> None:
    """Make the tables of both families of voices, and the model that has learnt the first, where they are not there."""
    with (CLIPS / "train.csv").open(newline="", encoding="utf-8") as file:
        clips = sorted(csv.DictReader(file), key=lambda clip: hashlib.sha1(clip["id"].encode()).digest())
    for family in ("espeak", "people"):
        spoken = [clip for clip in clips if clip["speaker"].startswith("espeak") == (family == "espeak")]
        write_clips(work / family, "validation", spoken[:CLIPS_HELD_OUT])
        write_clips(work / family, "train", spoken[CLIPS_HELD_OUT:])
    if not (work / "voices").exists():
        first = {"max_steps": FIRST_STEPS, "batch_size": 32, "learning_rate": 2e-3, "warmup_steps": 100, "seed": 0}
        options = common(work, "speech") | first | {"dataset_path": work / "espeak"}
        train("demo-scratch", 1, options, model=work / "voices")


# ----------------------------------------------------------------------------------------------------------------- runs


def common(work: Path, setting: str) -> dict[str, Any]:
    """Return what all runs of a setting have in common."""
    own = {"learning_rate": SPEECH_RATE} if setting == "speech" else {"learning_rate": RATE, "block_size": BLOCK}
    return {
        **own,
        "batch_size": BATCH,
        "lr_schedule": "linear",
        "warmup_steps": 0.05,
        "eval_interval": 0,
        "eval_before": "false",
        "snapshot_interval": 0,
        "threads": 1,
        "cache_dir": work / "cache",
    }


def run(work: Path, setting: str, options: dict[str, Any], members: int) -> dict[str, Any]:
    """Train, and return the loss (and word error rate), those of the members' own weights, and the bytes that a member
    has sent."""
    profile = "demo-scratch" if setting == "speech" else "nanogpt"
    start: dict[str, Any] = {"dataset_path": work / ("people" if setting == "speech" else "headers")}
    if setting != "scratch":
        start |= {"model_path": work / ("voices" if setting == "speech" else "model"), "from_scratch": "false"}
    begun = time.monotonic()
    measured = train(profile, members, common(work, setting) | start | options, simulated=members > 1)
    local = [f"validation.local-{rank}" for rank in range(members)] if "eval_local" in options else []
    return {
        "loss": measured.final_loss(),
        "wer": measured.final("validation").metrics.get("wer"),
        "local": [measured.final_loss(split) for split in local],
        "sent": sum(step.bytes_sent for step in measured.steps(0)),
        "seconds": time.monotonic() - begun,
    }


def kept(work: Path) -> dict[str, Any]:
    """Return all results that are there."""
    path = work / RESULTS
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def key(setting: str, name: str, seed: int, steps: int) -> str:
    return f"{setting}: {name}: {seed}: {steps}"


def table(results: dict[str, Any], setting: str, seeds: list[int], steps: int) -> None:
    """Print the rows that are there; a row of fewer seeds than are asked for says how many."""

    def found(name: str) -> dict[int, dict[str, Any]]:
        every = {seed: results.get(key(setting, name, seed, steps)) for seed in seeds}
        return {seed: one for seed, one in every.items() if one}

    single, every = ({seed: one["loss"] for seed, one in found(name).items()} for name in ("single", "allreduce"))
    heads = ["strategy / exchanges", "seeds", "loss", "over", "kept", "each alone", "MB sent"]
    heads += ["WER"] if setting == "speech" else []
    print(f"\n{setting}\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in cells(steps, setting):
        runs = {seed: one for seed, one in found(name).items() if seed in single and seed in every}
        if not runs:
            continue
        losses = [one["loss"] for one in runs.values()]
        over = [100 * (one["loss"] / every[seed] - 1) for seed, one in runs.items()]
        kept = [100 * (single[seed] - one["loss"]) / (single[seed] - every[seed]) for seed, one in runs.items()]
        own = [statistics.fmean(one["local"]) for one in runs.values() if one["local"]]
        sent = statistics.fmean(one["sent"] for one in runs.values()) / 1e6
        figures = [spread(losses, ".3f"), f"{spread(over, '+.1f')} %", f"{spread(kept, '.0f')} %"]
        words = [name, str(len(runs)), *figures, f"{statistics.fmean(own):.3f}" if own else "", f"{sent:.3g}"]
        words += [f"{spread([100 * one['wer'] for one in runs.values()], '.1f')} %"] if setting == "speech" else []
        print("| " + " | ".join(words) + " |")


def spread(values: list[float], form: str) -> str:
    """Return mean and standard deviation."""
    mean = f"{statistics.fmean(values):{form}}"
    return f"{mean} ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="texts, the trained model and results stay here")
    parser.add_argument("--headers", type=Path, default=Path("/usr/include"))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    results = kept(given.work)
    rows = {setting: cells(given.steps, setting) for setting in given.settings}
    if unknown := set(given.only) - set().union(*rows.values()):
        known = "; ".join(dict.fromkeys(name for some in rows.values() for name in some))
        raise SystemExit(f"no such row: {', '.join(unknown)}; there are: {known}")
    if not given.table:
        if "speech" in given.settings:
            make_voices(given.work)
        if set(given.settings) - {"speech"}:
            make_texts(given.work, given.headers)
        wanted = [
            (setting, seed, name)
            for setting, known in rows.items()
            for seed in given.seeds
            for name in given.only or known
            if name in known
        ]
        for setting, seed, name in wanted:
            at = key(setting, name, seed, given.steps)
            if at in results:
                continue
            options = {"max_steps": given.steps, "seed": seed, **rows[setting][name]}
            try:
                found = run(given.work, setting, options, 1 if name == "single" else MEMBERS)
            except SystemExit as error:
                print(f"{at}: {error}", file=sys.stderr, flush=True)
                continue
            results = kept(given.work) | {at: found}  # another one may have added to it
            (given.work / RESULTS).write_text(json.dumps(results, indent=1))
            print(f"{at}: {results[at]}", flush=True)
    for setting in given.settings:
        table(results, setting, given.seeds, given.steps)


if __name__ == "__main__":
    main()
