"""Access, findings and links of real machines as rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from app.wizard.assessment import of_findings
from app.wizard.machine_entries import HERE_KEY, hosts_of, machine_of
from app.wizard.outside import OUTSIDE, Outside
from app.wizard.state import AccessRow, CheckRow, MachineRow, Need, Status
from distributed.checks.examination import Examined
from distributed.checks.findings import Finding
from distributed.measuring.link_figures import PairFigures
from distributed.measuring.measure import Wish
from distributed.ssh.access import AccessReport, explain
from distributed.ssh.connection import SshTarget, Trust
from distributed.ssh.host_keys import HostKeyInfo
from profiles.errors import MachinesNotReady, MusterError
from profiles.schema import Profile

Tell = Callable[[str], None]
_WORDS = {
    "unknown_host_key": "first meeting", "host_key_changed": "key changed", "port_closed": "port closed",
    "name_unknown": "name unknown", "no_route": "no route", "timeout": "no answer", "not_ssh": "not SSH",
    "stalled": "stalled", "user_refused": "user refused", "no_key_accepted": "no key", "password_only": "password only",
    "password_refused": "wrong password", "no_shell": "no shell", "dropped": "dropped",
}  # fmt: skip


def trust_in(fingerprints: Sequence[str]) -> Trust:
    """Accept exactly the new host keys that a person has compared."""

    def accept(key: HostKeyInfo) -> bool:
        return key.fingerprint in fingerprints

    return accept


def target_of(row: MachineRow) -> SshTarget:
    return SshTarget.of(machine_of(row), hosts_of([row]))


# -------------------------------------------------------------------------------------------------------------- access


def access_row(row: MachineRow, trusted: Sequence[str], outside: Outside = OUTSIDE) -> AccessRow:
    """Go the whole way to a machine once."""
    return _access(row, outside.check_access(target_of(row), trust_in(trusted)))


def row_after_password(row: MachineRow, password: str, trusted: Sequence[str], outside: Outside = OUTSIDE) -> AccessRow:
    """Install our key with the password, and return how the way goes with the key alone."""
    target = target_of(row)
    try:
        report = outside.install_key(target, password, trust_in(trusted))
    except MusterError as error:
        report = explain(target, None, error)
    found = _access(row, report)
    if found.code == "password_refused":
        return replace(found, need=Need.PASSWORD, status=Status.WARNING)
    return found


def _access(row: MachineRow, report: AccessReport) -> AccessRow:
    need = Need.NOTHING
    if report.unknown_key is not None:
        need = Need.TRUST
    elif report.password_possible:
        need = Need.PASSWORD
    words = {True: Status.OK, False: Status.FAILED, None: Status.WAITING}
    fix = report.fix
    if need is Need.PASSWORD:
        fix = f"give its password once: it installs our key (or do it yourself: ssh-copy-id {_place(report)})"
    elif need is Need.TRUST and report.unknown_key is not None:
        fix = f"compare on that machine: {report.unknown_key.compare_command}"
    elif report.cause == "host_key_changed" and not fix:
        fix = f"if it was set up anew: ssh-keygen -R {row.address}"
    return AccessRow(
        key=row.key,
        name=row.name,
        status=Status.OK if report.ok else Status.WARNING if need is not Need.NOTHING else Status.FAILED,
        words="ok" if report.ok else _WORDS.get(report.cause, ""),
        cause=report.problem,
        fix=fix,
        stages=tuple((stage.value, words[passed]) for stage, passed in report.stages.items()),
        code=report.cause,
        need=need,
        fingerprint=report.fingerprint,
        compare=report.unknown_key.compare_command if report.unknown_key else "",
        where=report.where,
        user=report.user,
        system=report.system,
    )


def _place(report: AccessReport) -> str:
    host, _, port = report.where.rpartition(":")
    return f"{report.user}@{host}" if port in ("", "22") else f"-p {port} {report.user}@{host}"


# -------------------------------------------------------------------------------------------------------------- checks


def check_rows(
    rows: Sequence[MachineRow], task: str, trusted: Sequence[str] = (), outside: Outside = OUTSIDE
) -> list[CheckRow]:
    """Look at all machines side by side."""
    found = outside.examine(hosts_of(rows), task, trust_in(trusted))
    return [_check(row, one) for row, one in zip(rows, found, strict=True)]


def mend(rows: Sequence[MachineRow], task: str, tell: Tell, outside: Outside = OUTSIDE) -> None:
    """Give machines without packages an environment of ours.

    Raises:
        MachinesNotReady: where that did not go.
    """
    found = outside.examine(hosts_of(rows), task)
    problems = outside.repair(found, tell)
    if problems:
        raise MachinesNotReady("; ".join(problem.message for problem in problems), problems[0].hint)


def _check(row: MachineRow, one: Examined) -> CheckRow:
    found = of_findings(one.findings)
    return CheckRow(
        row.key, row.name, found.status, found.words, found.cause, found.fix, findings=tuple(one.findings),
        fixable=any(finding.safe and finding.level == "problem" for finding in one.findings), memory=one.memory,
    )  # fmt: skip


def doctor(outside: Outside = OUTSIDE) -> tuple[Finding, ...]:
    """Look at this computer."""
    here = MachineRow(HERE_KEY, outside.this_computer().name, here=True)
    return check_rows([here], "whisper", (), outside)[0].findings


# --------------------------------------------------------------------------------------------------------------- links


def measure_links(
    rows: Sequence[MachineRow], profile: Profile, trusted: Sequence[str], tell: Tell, outside: Outside = OUTSIDE
) -> Sequence[PairFigures]:
    """Measure every pair, or take what is known and fresh.

    Raises:
        NotReady: a machine cannot take part.
    """
    machines = outside.ready(hosts_of(rows), profile.model.task, trust_in(trusted))
    try:
        return outside.measure(machines, profile, Wish(links=True, machines=False), tell).pairs
    finally:
        for link, _ in machines:
            link.close()
