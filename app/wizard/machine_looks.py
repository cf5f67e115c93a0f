"""Access, findings and links of real machines as rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from app.wizard.machine_entries import HERE_KEY, hosts_of, machine_of
from app.wizard.outside import OUTSIDE, Outside
from app.wizard.state import AccessRow, CheckRow, FindingRow, LinkRow, MachineRow, Need, Status
from distributed.checks.examination import Examined
from distributed.checks.findings import Finding
from distributed.discovery.network_interfaces import PathKind, interface_kind
from distributed.measuring.link_figures import PairFigures
from distributed.measuring.measure import Wish
from distributed.ssh.access import AccessReport, explain
from distributed.ssh.connection import SshTarget, Trust
from distributed.ssh.host_keys import HostKeyInfo
from profiles.counts import counted
from profiles.errors import MachinesNotReady, MusterError
from profiles.schema import Profile

Tell = Callable[[str], None]
_LEVELS = {"ok": Status.OK, "warning": Status.WARNING, "problem": Status.FAILED}
_WORDS = {
    "unknown_host_key": "first meeting", "host_key_changed": "key changed", "port_closed": "port closed",
    "name_unknown": "name unknown", "no_route": "no route", "timeout": "no answer", "not_ssh": "not SSH",
    "stalled": "stalled", "user_refused": "user refused", "no_key_accepted": "no key", "password_only": "password only",
    "password_refused": "wrong password", "no_shell": "no shell", "dropped": "dropped",
}  # fmt: skip
ASYMMETRIC = 1.5
"""Times that one direction of a link is faster than the other, from which it is worth a word."""


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
    findings = tuple(_finding(finding) for finding in one.findings)
    failing = [finding for finding in findings if finding.status is Status.FAILED]
    warnings = [finding for finding in findings if finding.status is Status.WARNING]
    worst = next(iter(failing or warnings), None)
    words = f"{len(failing)} to mend" if failing else counted(len(warnings), "warning") if warnings else "ready"
    return CheckRow(
        key=row.key,
        name=row.name,
        status=worst.status if worst else Status.OK,
        words=words.replace("1 warnings", "1 warning"),
        cause=worst.cause if worst else "",
        fix=worst.fix if worst else "",
        findings=findings,
        fixable=any(finding.safe for finding in failing),
        memory=one.memory,
    )


def _finding(finding: Finding) -> FindingRow:
    status = _LEVELS[finding.level]
    return FindingRow(
        key=finding.check,
        name=finding.check,
        status=status,
        cause=finding.seen if status is not Status.OK else "",
        fix=finding.fix,
        seen=finding.seen,
        needed=finding.needed,
        safe=finding.safe,
    )


def doctor_rows(outside: Outside = OUTSIDE) -> tuple[FindingRow, ...]:
    """Look at this computer."""
    here = MachineRow(HERE_KEY, outside.this_computer().name, here=True)
    rows = check_rows([here], "whisper", (), outside)
    return rows[0].findings


# --------------------------------------------------------------------------------------------------------------- links


def link_rows(
    rows: Sequence[MachineRow], profile: Profile, trusted: Sequence[str], tell: Tell, outside: Outside = OUTSIDE
) -> list[LinkRow]:
    """Measure every pair, or take what is known and fresh.

    Raises:
        NotReady: a machine cannot take part.
    """
    machines = outside.ready(hosts_of(rows), profile.model.task, trust_in(trusted))
    try:
        found = outside.measure(machines, profile, Wish(links=True, machines=False), tell)
    finally:
        for link, _ in machines:
            link.close()
    return [_link(pair) for pair in found.pairs]


def _link(pair: PairFigures) -> LinkRow:
    key, name = f"{pair.source}|{pair.target}", f"{pair.source} - {pair.target}"
    figures = pair.figures
    if figures is None:
        return LinkRow(key, name, Status.FAILED, "nothing passes", pair.problem or "nothing passes between the two",
                       "does a firewall stand between? Runs over the hub need the way to this computer only",
                       pair.source, pair.target)  # fmt: skip
    warnings = tuple(_warnings(pair))
    return LinkRow(
        key=key,
        name=name,
        status=Status.WARNING if warnings else Status.OK,
        cause=warnings[0] if warnings else "",
        fix="a cable would help most" if figures.wireless or figures.wireless_back else "",
        source=pair.source,
        target=pair.target,
        mbit=figures.mbit,
        mbit_back=figures.mbit_back,
        rtt_ms=figures.rtt_ms,
        path=_path(pair),
        warnings=warnings,
    )


def _path(pair: PairFigures) -> str:
    figures = pair.figures
    assert figures is not None
    ways = f", the fastest of {len(figures.paths)} ways" if len(figures.paths) > 1 else ""
    return f"{figures.interface or '?'} to {figures.interface_back or '?'} ({figures.address}){ways}"


def _warnings(pair: PairFigures) -> list[str]:
    figures = pair.figures
    assert figures is not None
    found = []
    wireless = [n for n, on in ((pair.source, figures.wireless), (pair.target, figures.wireless_back)) if on]
    if wireless:
        found.append(f"Wi-Fi: {' and '.join(wireless)}")
    slow, fast = sorted((figures.mbit, figures.mbit_back))
    if fast > ASYMMETRIC * slow:
        found.append(f"asymmetric: {fast:.0f} Mbit/s one way, {slow:.0f} the other")
    if any(interface_kind(name, {}) is PathKind.VPN for name in (figures.interface, figures.interface_back)):
        found.append("goes through a VPN")
    if pair.busy:
        found.append(f"others moved {figures.other_mbit:.0f} Mbit/s there meanwhile: measure again when it is idle")
    if max(figures.loss, figures.loss_back) > 0.01:
        found.append(f"{100 * max(figures.loss, figures.loss_back):.1f} % was lost and sent again")
    return found
