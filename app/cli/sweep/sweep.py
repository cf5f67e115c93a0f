"""``sweep``: train a profile with every combination of some values, over idle machines, and show which is best.

A trial is an ordinary run of ``train`` in a folder of its own. One that is completed is not run again, so the same
command goes on after a stop.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from app.cli.approval import read_hosts
from app.cli.arguments import OUTPUT, Json, Output
from app.cli.sweep.sweep_trials import Slot, SweepBench, SweepTrial, finished
from app.cli.terminal import answer
from app.cli.train.command import merged_overrides
from app.cli.train.request import TrainRequest
from app.cli.train.start import profile_of
from app.comparison import read_run
from app.console import command_line, say, show, show_line, visible
from distributed.hosts.file import save_hosts
from profiles.errors import BadInput, ExitCode, StoppedByUser, counted
from profiles.options import canonical, hint_for, options_by_name
from profiles.quantities import duration_text, loss_text
from training.records.run_folder import RunFolder
from training.records.runs import summarise
from training.workers.data_findings import check_data

_MOST = 200
"""Trials of a sweep: more are a slip."""
_SET_HERE = ("hosts", "workers", "output_dir", "simulate", "cluster")


def sweep(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Left out for a task of your own.")] = "",
    over: Annotated[
        list[str],
        typer.Option("--over", metavar="KEY=A,B", help="Values of an option to try; repeated: every combination."),
    ] = [],  # noqa: B006 - typer copies it
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any option, for all trials; may be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    hosts: Annotated[
        str, typer.Option(metavar="FILE", help="Machines, each of which trains one trial at a time; default: this one.")
    ] = "",
    jobs: Annotated[int, typer.Option(metavar="N", min=0, max=64, help="Trials at a time here; 0: one.")] = 0,
    trust_code: Annotated[bool, typer.Option("--trust-code", help="Run Python code that the profile names.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Train with each combination of values, and rank them by the loss at the end.

    Raises:
        BadInput: the values, or the job with one of them, cannot be used; nothing was started.
        StoppedByUser: a signal came; trials that are whole stay.
    """
    overrides = merged_overrides(settings)
    trials = _planned(profile, overrides, over, output, as_json, trust_code)
    slots = _slots(hosts, jobs, trials[0].folder.parent)
    if there := [trial for trial in trials if finished(trial.folder)]:
        say(f"{counted(len(there), 'trial')} of {len(trials)} done already")
    named = [profile] if profile else []
    arguments = [*named, *_assignments(overrides), *(["--trust-code"] if trust_code else [])]
    bench = SweepBench(slots, arguments)
    bench.carry_out([trial for trial in trials if trial not in there])
    results = [_result(trial, bench.problems.get(trial, "")) for trial in trials]
    results.sort(key=lambda result: (math.inf if result.loss is None else result.loss, result.loss is None))
    if bench.stopped.is_set():
        done = sum(result.loss is not None for result in results)
        raise StoppedByUser(f"stopped; {done} of {counted(len(trials), 'trial')} stay: the same command goes on")
    if results[0].loss is None:
        raise BadInput(
            f"no trial came to its end: {results[0].problem}", f"their logs are in {trials[0].folder.parent}"
        )
    best = command_line(
        "distributed-train", *([profile] if profile else []), *_assignments({**overrides, **results[0].options})
    )
    if as_json:
        rows = [result.document() for result in results]
        return answer(True, {"trials": rows, "best": rows[0], "command": best}, ())
    _show(results, best)
    return ExitCode.DONE


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial."""

    options: Mapping[str, str]
    run: Path | None
    loss: float | None
    """At the end; ``None``: it has none."""
    split: str = ""
    seconds: float = 0.0
    problem: str = ""

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        run = str(self.run) if self.run else None
        return {"options": dict(self.options), "loss": self.loss, "split": self.split, "run": run,
                "seconds": round(self.seconds, 1), "problem": self.problem}  # fmt: skip


def _assignments(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in ("--set", f"{name}={value}")]


def combinations(over: Sequence[str]) -> list[dict[str, str]]:
    """Return the options of every trial, in the order in which they were typed.

    Raises:
        BadInput: no values, an unknown option, one that is given twice, or too many combinations.
    """
    values: dict[str, list[str]] = {}
    for text in over:
        name, _, listed = text.partition("=")
        name = canonical(name.strip().replace("-", "_"))
        if name not in options_by_name():
            hint = hint_for(name, options_by_name(), "name an option, as in --over learning_rate=1e-5,1e-4")
            raise BadInput(f"--over {visible(text)}: no option '{visible(name)}'", hint)
        if name in _SET_HERE or name in values:
            problem = "given twice" if name in values else "the sweep decides it"
            raise BadInput(f"--over {name}: {problem}", "leave it out")
        values[name] = list(dict.fromkeys(value.strip() for value in listed.split(",") if value.strip()))
        if not values[name]:
            raise BadInput(f"--over {visible(text)}: no values", f"write for example --over {name}=A,B")
    if not values:
        raise BadInput("nothing to try", "name values: --over learning_rate=1e-5,1e-4")
    trials = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    if len(trials) > _MOST:
        raise BadInput(f"{len(trials)} combinations are more than {_MOST}", "name fewer values")
    return trials


def _planned(
    profile: str, overrides: Mapping[str, str], over: Sequence[str], output: Path, as_json: bool, trust_code: bool
) -> list[SweepTrial]:
    """Return the trials, of which every one can be used."""
    for name in _SET_HERE:
        if name in overrides:
            raise BadInput(f"--set {name}: the sweep decides it", "use --hosts, --jobs and --output")
    trials = []
    for number, options in enumerate(combinations(over)):
        if both := options.keys() & overrides.keys():
            raise BadInput(f"'{min(both)}' is in --set and in --over", "give it once")
        request = TrainRequest(profile, {**overrides, **options}, as_json=as_json, trust_code=trust_code)
        chosen = profile_of(request)
        if not number:
            check_data(chosen)
        name = ", ".join(f"{name}={value}" for name, value in options.items())
        letters = "".join(letter if letter.isalnum() or letter in "=.-_" else "_" for letter in name)
        settings = chosen.model_dump_json(exclude={"run"}).encode()  # with others it is another trial
        folder = f"{letters[:100]}-{hashlib.sha256(settings).hexdigest()[:8]}"
        trials.append(SweepTrial(name, options, output.resolve() / f"sweep-{chosen.name}" / folder))
    return trials


def _slots(hosts: str, jobs: int, folder: Path) -> list[Slot]:
    """Return where trials run at a time: on each machine one, or here."""
    if not hosts:
        return [Slot(f"here ({number + 1})", ("--local", "1")) for number in range(jobs or 1)]
    if jobs:
        raise BadInput("--jobs is for trials on this machine", "each machine of --hosts trains one at a time")
    listed = read_hosts(Path(hosts), named=True, person=False)
    folder.mkdir(parents=True, exist_ok=True)
    slots = []
    for machine in listed.machines:
        file = folder / f"hosts-{machine.name}.json"
        save_hosts(listed.only([machine.name]), file)
        # one machine exchanges nothing, so no strategy has to be measured
        slots.append(Slot(machine.name, ("--hosts", str(file), "--set", "strategy=allreduce", "--no-input")))
    return slots


def _result(trial: SweepTrial, problem: str) -> TrialResult:
    run = finished(trial.folder)
    figures = read_run(0, RunFolder.open(run).events()) if run else None
    if run is None or figures is None or not figures.curve:
        return TrialResult(trial.options, run, None, problem=problem or "it took no step")
    return TrialResult(trial.options, run, figures.curve[-1][1], figures.split, summarise(run).seconds or 0.0)


def _show(results: Sequence[TrialResult], best: str) -> None:
    names = list(results[0].options)
    figures = [Column(name, justify="right") for name in (*names, "loss", "time")]
    table = Table(*figures, "", box=None, header_style="bold", pad_edge=False)
    for result in results:
        cells = [result.options[name] for name in names]
        cells += ["" if result.loss is None else loss_text(result.loss)]
        cells += [duration_text(result.seconds) if result.seconds else "", result.problem]
        table.add_row(*[Text(visible(cell)) for cell in cells])
    show(table)
    show_line("")
    show_line(f"loss    of {results[0].split}, at the end")
    for name in names:
        chosen, tried = results[0].options[name], list(dict.fromkeys(result.options[name] for result in results))
        if edge := _edge(tried, chosen):
            show_line(visible(f"edge    {name} = {chosen} is the {edge} that was tried: try beyond it"))
    show_line(visible(f"model   {results[0].run}/model"))
    show_line(visible(f"train   {best}"))


def _edge(tried: Sequence[str], best: str) -> str:
    """Return at which end of the numbers that were tried the best one is; empty: at none."""
    try:
        numbers = sorted(map(float, tried))
    except ValueError:
        return ""
    ends = {numbers[0]: "smallest", numbers[-1]: "largest"}
    return ends.get(float(best), "") if len(numbers) > 1 else ""
