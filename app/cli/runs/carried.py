"""``attach`` and ``stop`` on the machine of a member, which has no folder of the run."""

from __future__ import annotations

from app.cli.terminal import answer
from app.console import say
from app.progress import PlainProgress
from distributed.run.carried import find_carried
from profiles.errors import ExitCode


def show_carried(reference: str, as_json: bool, stop_reason: str = "") -> ExitCode | None:
    """Show line by line what a member of a run does on this machine, until it ends.

    Args:
        reference: the run's id, or its beginning or end; empty: the newest run.
        stop_reason: not empty: stop the run, on all machines.

    Returns:
        The exit code of the member; ``None``: no member of such a run works here.

    Raises:
        BadInput: it has just ended, or cannot be stopped here.
    """
    if (run := find_carried(reference)) is None:
        return None
    code, title = ExitCode.RUN_FAILED, f"{run.run_id}: member {run.rank}, which works on this machine"
    progress: PlainProgress | None = None
    for event in run.follow(stop_reason):
        if isinstance(event, ExitCode):
            code = event
            continue
        if progress is None:
            progress = PlainProgress(title, begun=event.time)
            progress.__enter__()
        progress(event)
    if stop_reason:
        say("stopped on this machine; the others stop after the same step")
    return answer(as_json, {"run_id": run.run_id, "member": int(run.rank), "exit_code": int(code)}, (), code)
