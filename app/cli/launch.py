"""``launch``: any training script on these machines, with torchrun's environment and the mesh as its group."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.cli.arguments import OUTPUT, Detach, Json, Output
from app.cli.attach import log_lines, tell
from app.cli.local_run import run_to_end
from app.cli.terminal import answer
from app.console import command_about, say, show_json, show_line, visible
from app.progress import PlainProgress
from app.report import Ended, document, title_of
from profiles.errors import BadInput, ExitCode
from profiles.schema import CUSTOM, ModelSettings, Profile, RunSettings, StrategySettings
from training.event_log import read_events
from training.events import ErrorEvent
from training.plan import Launch, MemberPlan, RunPlan
from training.processes import BackgroundProcess, end_processes
from training.resources import count_gpus, whole_cores
from training.run_folder import RunFolder, new_run_id
from training.strategies.registry import usual_strategy

Backend = Literal["auto", "muster", "script"]


def launch(
    script: Annotated[list[str], typer.Argument(metavar="-- SCRIPT ARGS", help="The script, or -m MODULE.")],
    local: Annotated[int, typer.Option("--local", metavar="N", min=1, max=64, help="N processes here.")] = 0,
    backend: Annotated[
        Backend,
        typer.Option(
            "--backend", help="Groups that are ours: auto: of gloo, NCCL between machines, or no name; muster: all."
        ),
    ] = "auto",
    detach: Detach = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Start a script everywhere, and show what it writes."""
    name, job = script_of(script, backend)
    plan = local_plan(name, job, local, output)
    folder = RunFolder.create(output, plan, sys.argv)
    if detach:
        folder.close()
        BackgroundProcess("app.cli.local_run").start(folder.path)
        return leave(folder.path, plan.run_id, as_json)
    with shown_logs(folder.path, as_json):
        ended = run_to_end(plan, folder, PlainProgress(title_of(plan)))
    return tell_end(ended, {"this machine": end_processes(plan.run_id)}, as_json)


def script_of(words: list[str], backend: Backend) -> tuple[str, Launch]:
    """Return a name for the run, and the script without its places.

    Raises:
        BadInput: there is no such file.
    """
    module = words[0] == "-m"
    target, *arguments = words[1:] if module else words or [""]
    if not module:
        path = Path(target).expanduser().resolve()
        if not path.is_file():
            raise BadInput(f"{target}: no such script", "launch -- train.py --its args")
        target = str(path)
    name = target.rpartition(".")[2] if module else Path(target).stem
    return name, Launch(
        script=target, module=module, arguments=tuple(arguments), backend=backend, machines=(), addresses=()
    )


def local_plan(name: str, job: Launch, processes: int, output: Path) -> RunPlan:
    """Return the plan of ``processes`` ranks on this machine; 0: one for each GPU."""
    processes = processes or max(1, count_gpus())
    threads = max(1, whole_cores() // processes)
    members = tuple(
        MemberPlan(rank=rank, name=f"rank-{rank}", batch_size=1, threads=threads, local=True)
        for rank in range(processes)
    )
    job = job.model_copy(update={"machines": (0,) * processes, "addresses": ("127.0.0.1",)})
    model = ModelSettings(task=CUSTOM, model_path=f"{job.script}:__main__")
    strategy, run = StrategySettings(strategy=usual_strategy()), RunSettings(output_dir=str(output))
    profile = Profile(name=name, model_name=job.title, model=model, strategy=strategy, run=run)
    return RunPlan(run_id=new_run_id(), profile=profile, members=members, engine="mesh", launch=job)


@contextlib.contextmanager
def shown_logs(path: Path, as_json: bool) -> Iterator[None]:
    """Write what all ranks write to stdout meanwhile, each line with its rank."""
    over = threading.Event()

    def show() -> None:
        for line in log_lines(path, lambda: not over.is_set()):
            show_line(line)

    reader = threading.Thread(target=show, daemon=True)
    if not as_json:
        reader.start()
    try:
        yield
    finally:
        over.set()
        if not as_json:
            reader.join()


def leave(path: Path, run_id: str, as_json: bool) -> ExitCode:
    """Tell of a run in the background."""
    code = answer(as_json, {"run_id": run_id, "run_dir": str(path), "status": "starting"}, [run_id])
    if not as_json:
        say(f"runs in the background; watch it with: {command_about(path, 'attach')}")
    return code


def tell_end(ended: Ended, left: Mapping[str, list[str]], as_json: bool) -> ExitCode:
    """Tell how it ended, of a failure first the traceback of the rank that failed first, and what is left where."""
    if as_json:
        show_json({**document(ended), "left": left, "exit_code": int(ended.exit_code)})
        return ended.exit_code
    if ended.status == "failed":
        errors = (event for event in read_events(ended.run_dir / "events.jsonl") if isinstance(event, ErrorEvent))
        for line in next((error.traceback for error in errors), "").splitlines():
            say(visible(line))
    tell(ended, False)
    for name, processes in left.items():
        if processes or ended.status != "completed":
            say(f"{visible(name)}: {'; '.join(map(visible, processes)) or 'nothing is left'}")
    return ended.exit_code
