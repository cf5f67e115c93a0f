"""``doctor``: check whether this computer can train; all checks, or some by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Json
from app.cli.terminal import answer
from app.console import say, visible
from profiles.errors import BadInput, ExitCode
from profiles.installation import can_train
from profiles.options import hint_for
from profiles.schema import DEFAULT_TASK


def doctor(
    checks: Annotated[list[str] | None, typer.Argument(metavar="[CHECK]...", help="Only these checks.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the checks.")] = False,
    measured: Annotated[
        bool, typer.Option("--self-test", help="Measure what trains here, for minutes; writes a report to send in.")
    ] = False,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="With --self-test: cpu, cuda or mps.")] = "auto",
    out: Annotated[Path, typer.Option(metavar="FILE", help="With --self-test: the report.")] = Path(
        "muster-self-test.md"
    ),
    as_json: Json = False,
) -> ExitCode:
    """Check this computer, and suggest fixes.

    Raises:
        BadInput: there is no such check, or no such device.
    """
    if measured:
        return _self_test(device, out, as_json)
    from distributed.checks.examination import examine
    from distributed.checks.findings import CHECKS, UNKNOWN
    from distributed.machine.link import this_machine

    width = max(map(len, CHECKS))
    if listed:
        lines = [f"{name:{width}}  {about}" for name, about in CHECKS.items()]
        return answer(as_json, {"checks": CHECKS}, lines)
    for name in checks or ():
        if name not in CHECKS:
            raise BadInput(f"there is no check '{name}'", hint_for(name, CHECKS, "--list shows them"))
    (examined,) = examine(this_machine(), DEFAULT_TASK)
    findings = [finding for finding in examined.findings if not checks or finding.check in checks]
    lines = []
    for finding in findings:
        needed = f" (needed: {finding.needed})" if finding.needed and finding.level != "ok" else ""
        level = UNKNOWN if finding.is_unknown else finding.level
        lines.append(f"{level:8} {finding.check:{width}}  {visible(finding.seen + needed)}")
        lines += [f"{'':{width + 11}}fix: {visible(finding.fix)}"] if finding.fix else []
    checked = {finding.check for finding in findings}
    lines += [f"{'-':8} {name:{width}}  nothing to check here" for name in checks or () if name not in checked]
    has_problem = any(finding.level == "problem" for finding in findings)
    code = ExitCode.NOT_READY if has_problem else ExitCode.DONE
    return answer(as_json, {"findings": [finding._asdict() for finding in findings]}, lines, code)


def _self_test(device: str, out: Path, as_json: bool) -> ExitCode:
    """Measure the training device, and write the report."""
    if not can_train():
        from app.cli.handover import install_and_hand_over  # of a light core alone

        install_and_hand_over()
    from training.trial.self_test import report, self_test  # loads torch

    rows = self_test(device, tell=say)
    try:
        out.write_text(report(rows), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{out}: {error.strerror}", "name another file with --out") from error
    lines = [f"report: {out}; send it in, and docs/reference/platforms.md gets its rows"]
    failed = [row.what for row in rows if not row.ok]
    lines += [f"failed: {', '.join(failed)}"] if failed else []
    code = ExitCode.NOT_READY if failed else ExitCode.DONE
    return answer(as_json, {"report": str(out), "rows": [row._asdict() for row in rows]}, lines, code)
