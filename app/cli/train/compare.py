"""``compare``: which of two models transcribes better, or with ``--strategies``, which strategy suits a profile."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from app.cli.arguments import OUTPUT, Json, Output
from app.cli.model.evaluate import Seed
from app.cli.terminal import answer
from app.cli.train.command import merged_overrides
from app.cli.train.request import TrainRequest
from app.cli.train.start import profile_of
from app.cli.train.trials import Bench, Trial, trials_of, whole_runs
from app.comparison import StrategyComparison, StrategyResult, rank_strategies, read_run
from app.console import say, show, show_line, visible
from app.html_report.comparison import remarks, result_tables, why_best, write_comparison
from app.task_results import results_of
from distributed.planning.memory.fitting import fit
from distributed.preparation.preflight import local_memory_budgets
from profiles.errors import BadInput, ExitCode, StoppedByUser, counted
from profiles.files.layers import DEFAULT
from profiles.files.library import check_name
from profiles.files.resolve import load_profile, save_profile
from profiles.options import has_effect
from profiles.quantities import bytes_text
from profiles.schema import DEFAULT_TASK, Profile
from training.hardware.resources import whole_cores
from training.records.run_folder import RunFolder
from training.records.runs import size_of
from training.strategies.composition import component_names
from training.strategies.registry import check_strategy
from training.workers.data_findings import check_data

_USUAL_LINKS = "20,100,1000"
_SET_HERE = ("strategy", "simulate", "workers", "hosts")
"""Options that the command sets itself."""


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Strategies", **settings)


def compare(
    references: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A [B]",
            help="Runs, or files predictions.csv; a single run, by default the newest, is compared before and after "
            "training. With --strategies: a profile.",
        ),
    ] = None,
    seed: Seed = 0,
    strategies: Annotated[
        str, _option(metavar="NAMES", help="Train a profile with each of these, separated by commas, and compare.")
    ] = "",
    members: Annotated[int, _option(metavar="N", min=2, max=64, help="Members of a run, simulated here.")] = 4,
    seeds: Annotated[int, _option(metavar="N", min=1, max=100, help="Runs of each strategy.")] = 3,
    links: Annotated[str, _option(metavar="RATES", help="Links to predict times for, in Mbit/s.")] = _USUAL_LINKS,
    cluster: Annotated[
        str, _option(metavar="FILE", help="Machines to simulate; the times shown are theirs (docs/how-to/scale.md).")
    ] = "",
    jobs: Annotated[int, _option(metavar="N", min=0, max=256, help="Runs at a time; 0: one for every two cores.")] = 0,
    save: Annotated[str, _option(metavar="NAME", help="Save the best as a profile.")] = "",
    settings: Annotated[
        list[str],
        _option("--set", metavar="KEY=VALUE", help="Any option, for all strategies that read it; may be repeated."),
    ] = [],  # noqa: B006 - typer copies it
    trust_code: Annotated[bool, _option("--trust-code", help="Run the Python code that the profile names.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Compare two models by their texts, or several strategies by their runs.

    Raises:
        BadInput: what is to be compared is not there or cannot be used.
    """
    named = references or []
    if strategies:
        settings = [*settings, *([f"cluster={cluster}"] if cluster else [])]
        request = CompareRequest(
            named, strategies, members, seeds, links, jobs, save, settings, trust_code, output, as_json
        )
        return compare_strategies(request)
    if save or settings or trust_code or cluster:
        raise BadInput("these options compare strategies", "name them with --strategies allreduce,diloco")
    return results_of(DEFAULT_TASK).compare(named or [""], seed, output, as_json)


@dataclass(frozen=True)
class CompareRequest:
    """Arguments of the command line."""

    references: Sequence[str]
    strategies: str
    members: int
    seeds: int
    links: str
    jobs: int
    save: str
    settings: Sequence[str]
    trust_code: bool
    output: Path
    as_json: bool

    @property
    def profile(self) -> str:
        """Name of the profile; empty for a custom job that needs none."""
        if len(self.references) > 1:
            raise BadInput(f"strategies are compared on one profile, not on {len(self.references)}", "name one profile")
        return self.references[0] if self.references else ""

    @property
    def names(self) -> list[str]:
        """The strategies, not yet checked against each other and the job."""
        requested = [name.strip() for name in self.strategies.split(",") if name.strip()]
        if not requested:
            raise BadInput("--strategies names none", "write for example --strategies allreduce,diloco")
        if "auto" in requested:
            raise BadInput("auto is no strategy of its own", "name those that are to be compared")
        names = [" + ".join(map(check_strategy, component_names(name))) for name in requested]
        return list(dict.fromkeys(names))

    @property
    def rates(self) -> list[float]:
        """Link rates in Mbit/s, slowest first."""
        try:
            rates = sorted({float(rate) for rate in self.links.split(",") if rate.strip()})
        except ValueError:
            rates = [math.nan]
        if any(not 0 < rate <= 1e6 for rate in rates):
            hint = f"rates in Mbit/s, separated by commas: --links {_USUAL_LINKS}"
            raise BadInput(f"--links {visible(self.links)}: not the rates of links", hint)
        return rates

    @property
    def overrides(self) -> dict[str, str]:
        overrides = merged_overrides(self.settings)
        for name in _SET_HERE:
            if name in overrides:
                raise BadInput(f"--set {name}: the comparison decides it", "use --strategies and --members")
        return overrides


def compare_strategies(request: CompareRequest) -> ExitCode:
    """Run ``compare --strategies``.

    Raises:
        BadInput: the job cannot be used with any of the strategies.
        StoppedByUser: a signal came; runs that are whole stay.
    """
    rates, jobs = request.rates, request.jobs or max(1, whole_cores() // 2)
    if request.save:
        check_name(request.save)
    trials, refused = _planned(request, jobs)
    if not trials:
        raise BadInput(*next(iter(refused.values())))
    folder = request.output / f"compare-{trials[0].plan.profile.name}"
    run_folders = whole_runs(folder, trials)
    if run_folders:
        verb = "is" if len(run_folders) == 1 else "are"
        say(f"{counted(len(run_folders), 'run')} of {len(trials)} {verb} there already")
    bench = Bench(folder, jobs, sys.argv)
    if remaining := [trial for trial in trials if trial not in run_folders]:
        run_folders |= bench.carry_out(remaining)
    if bench.stopped.is_set():
        raise StoppedByUser(
            f"stopped; {len(run_folders)} of {counted(len(trials), 'run')} stay: the same command goes on"
        )
    refusals = {name: message for name, (message, _) in refused.items()} | bench.refused
    cores = float(trials[0].plan.members[0].lead.threads)
    members = trials[0].plan.world_size
    result = rank_strategies(_tried(request.names, trials, run_folders, refusals), members, rates, cores)
    if not result.best:
        raise BadInput(next(iter(refusals.values())), f"logs are in {folder}")
    saved = _save(request, result) if request.save else None
    page = write_comparison(result, trials[0].plan.profile.name, members, folder)
    if request.as_json:
        places = {"folder": str(folder), "page": str(page), "saved": str(saved) if saved else None}
        return answer(True, {**document(result), **places}, ())
    _show(members, result, folder, page)
    if saved:
        show_line(f"saved   {visible(saved)}")
    return ExitCode.DONE


def _planned(request: CompareRequest, jobs: int) -> tuple[list[Trial], dict[str, tuple[str, str]]]:
    """Return all runs, the first seed of every strategy first, and the reasons why strategies have none."""
    trials_by_strategy: list[list[Trial]] = []
    refused: dict[str, tuple[str, str]] = {}
    overrides, all_strategies = request.overrides, " + ".join(request.names)
    for name in request.names:
        applicable = {
            key: value
            for key, value in overrides.items()
            if has_effect(key, name) or not has_effect(key, all_strategies)
        }
        try:
            fitted, chosen = _fitted(request, {**applicable, "strategy": name}), "eval_interval" in overrides
            trials = trials_of(fitted, request.members, request.seeds, jobs, evaluations_chosen=chosen)
            trials_by_strategy.append(
                [replace(trial, strategy=name) for trial in trials]
            )  # with a file's path as it was written
        except BadInput as error:
            refused[name] = (error.message, error.hint)
    return [trials[i] for i in range(request.seeds) for trials in trials_by_strategy], refused


def _fitted(request: CompareRequest, overrides: Mapping[str, str]) -> Profile:
    train_request = TrainRequest(
        request.profile, dict(overrides), as_json=request.as_json, trust_code=request.trust_code
    )
    profile = profile_of(train_request)
    check_data(profile)
    return fit(profile, local_memory_budgets(profile, 1), say)


def _tried(
    names: Sequence[str], trials: Sequence[Trial], run_folders: Mapping[Trial, Path], refused: Mapping[str, str]
) -> list[StrategyResult]:
    """Return the result of every strategy in the order given, with its runs by seed."""
    profiles = {trial.strategy: trial.plan.profile for trial in trials}
    rows = []
    for name in names:
        folder_by_seed = sorted((trial.seed, path) for trial, path in run_folders.items() if trial.strategy == name)
        run_results = [read_run(seed, RunFolder.open(path).events()) for seed, path in folder_by_seed]
        rows.append(StrategyResult(name, profiles.get(name), tuple(filter(None, run_results)), refused.get(name, "")))
    return rows


def _save(request: CompareRequest, result: StrategyComparison) -> Path:
    """Save the profile with the best strategy."""
    overrides = {key: value for key, value in request.overrides.items() if has_effect(key, result.best)}
    overrides["strategy"] = result.best
    if not request.profile:
        return save_profile(request.save, overrides)
    resolved = load_profile(request.profile, overrides)
    values = {name: resolved.value(name) for name, origin in resolved.origins.items() if origin != DEFAULT}
    applicable = {name: value for name, value in values.items() if value and has_effect(name, result.best)}
    return save_profile(request.save, applicable)


# ------------------------------------------------------------------------------------------------------------- to read


def document(result: StrategyComparison) -> dict[str, Any]:
    """Return the comparison as a JSON document."""
    comparison = asdict(result)
    for row_document, row in zip(comparison["rows"], result.rows, strict=True):
        del row_document["profile"]
        row_document |= {"loss": row.loss if row.losses else None, "spread": row.spread if row.losses else None}
    return comparison


def _show(members: int, result: StrategyComparison, folder: Path, page: Path) -> None:
    for result_table in result_tables(result, members):
        show_line(result_table.title)
        figures = [Column(name, justify="right") for name in result_table.header[1:]]
        table = Table(result_table.header[0], *figures, box=None, header_style="bold", pad_edge=False)
        for row in result_table.rows:
            table.add_row(*[Text(visible(cell)) for cell in row])
        show(table)
        show_line("")
    for line in remarks(result):
        show_line(visible(line))
    show_line(f"best    {visible(result.best)}: {why_best(result)}")
    show_line(visible(f"curves  {page}"))
    show_line(visible(f"runs    {folder}, {bytes_text(size_of(folder))}"))
