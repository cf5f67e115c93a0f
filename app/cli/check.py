"""``distributed-check``: which machines are ready, what would slow them down, and the repair of what is safe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import USUAL_HOSTS, Json, TrustNew
from app.cli.terminal import somebody
from app.console import say, say_error, show_json, show_line, visible
from profiles.errors import ExitCode

if TYPE_CHECKING:
    from distributed.checks.examination import Examined
    from distributed.preparation.preflight import Readiness


def distributed_check(
    profile: Annotated[str, typer.Argument(metavar="[PROFILE]", help="Check for this profile's task.")] = "",
    hosts: Annotated[
        Path | None, typer.Option("--hosts", metavar="FILE", help="Hosts file; empty: distributed_hosts.json.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Install missing packages into Muster's folder there.")] = False,
    offline_wheels: Annotated[
        bool, typer.Option("--offline-wheels", help="With --fix: send the packages from this machine.")
    ] = False,
    trust_new: TrustNew = False,
    as_json: Json = False,
) -> ExitCode:
    """Look at all machines of a hosts file; without a profile, for speech recognition.

    Raises:
        BadInput: the hosts file or the profile cannot be used.
    """
    from app.cli.access import trust
    from app.cli.approval import read_hosts
    from distributed.checks.examination import examine, repair
    from training.tasks.published_models import usable_profile

    job = usable_profile(profile, tell=say).profile if profile else None
    task = job.model.task if job else "whisper"
    machines = read_hosts(hosts or USUAL_HOSTS, named=hosts is not None, person=somebody(as_json))
    found = examine(machines, task, trust(trust_new), job)
    if (fix or offline_wheels) and any(one.readiness.provisionable for one in found):
        for error in repair(found, lambda line: say(visible(line)), offline_wheels):
            say_error(error.message, error.hint)
        found = examine(machines, task, trust(trust_new), job)
    code = ExitCode.DONE if all(one.ready for one in found) else ExitCode.NOT_READY
    if as_json:
        show_json({"machines": [_document(one) for one in found], "exit_code": int(code)})
    else:
        for one in found:
            _show(one)
    return code


def _show(one: Examined) -> None:
    problem = one.readiness.problem
    if problem is not None:
        say_error(problem.message, problem.hint)
    elif one.ready:
        show_line(visible(_ready_line(one.readiness)))
    for finding in one.findings:
        if finding.level == "problem" and finding.check != "ready":
            say_error(f"{one.name}: {visible(finding.seen)}", finding.fix)
        elif finding.level == "warning":
            needed = f" (needed: {finding.needed})" if finding.needed else ""
            fix = f"; {finding.fix}" if finding.fix else ""
            show_line(f"{one.name}: warning: {visible(f'{finding.seen}{needed}{fix}')}")


def _ready_line(one: Readiness) -> str:
    facts = one.facts
    assert facts is not None
    python = ".".join(str(part) for part in facts.python)
    gpus = f", {facts.gpus} CUDA devices" if facts.gpus else ""
    return (
        f"{one.link.name}: ready ({facts.system}, Python {python}, torch {facts.torch}{gpus}, "
        f"{facts.free // 1_000_000_000} GB free, clock {facts.clock_ahead:+.1f} s)"
    )


def _document(one: Examined) -> dict[str, object]:
    readiness, facts = one.readiness, one.readiness.facts
    document: dict[str, object] = {"name": one.name, "ready": one.ready}
    if readiness.problem is not None:
        document |= {"problem": readiness.problem.message, "fix": readiness.problem.hint}
    elif facts is not None:
        document |= {"torch": facts.torch, "python": list(facts.python), "free_bytes": facts.free,
                     "clock_ahead": facts.clock_ahead, "gpus": facts.gpus}  # fmt: skip
    return document | {"findings": [finding._asdict() for finding in one.findings]}
