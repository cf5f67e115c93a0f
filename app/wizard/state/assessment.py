"""Assessments of domain records for display: a status, a short label, the cause of a problem and its fix."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from app.wizard.state.records import FINE, Access, AccessNeed, Assessment, ItemStatus, MachineRow
from distributed.discovery.network_interfaces import PathKind, interface_kind
from profiles.errors import counted
from profiles.quantities import mbit_text, rate_text, share_text

if TYPE_CHECKING:  # modules that load SSH, which the first screen does without
    from distributed.checks.findings import Finding
    from distributed.measuring.link_figures import PairFigures
    from distributed.ssh.access import AccessReport
    from training.records.runs import RunSummary

THIS_NETWORK = "this network"
"""Origin of a machine that answered when its network was asked, in place of its being typed."""
_LEVELS = {"ok": ItemStatus.OK, "warning": ItemStatus.WARNING, "problem": ItemStatus.FAILED}
INSTALLS = "f installs what is missing, into Muster's own folder there"
_ASYMMETRIC = 1.5
"""Ratio of a link's faster to its slower direction above which a warning is shown."""
_FAST_MBIT = 1000.0
"""Rate of the slower direction from which no warning is shown: no exchange waits for such a link."""
_LOST = 0.01
"""Share of retransmitted bytes above which a warning is shown."""


# ---------------------------------------------------------------------------------------------------------------- home

_ENDINGS = {
    "completed": ItemStatus.OK,
    "cancelled": ItemStatus.STOPPED,
    "failed": ItemStatus.FAILED,
    "damaged": ItemStatus.FAILED,
}


def of_run(run: RunSummary) -> Assessment:
    status = ItemStatus.WORKING if run.live else _ENDINGS.get(run.status, ItemStatus.WARNING)
    fix = "check its folder, or remove it" if run.damage else ""
    return Assessment(status=status, words=run.status_text, cause=run.damage, fix=fix)


# ------------------------------------------------------------------------------------------------------ access, checks

_CAUSES = {
    "unknown_host_key": "new host key", "host_key_changed": "key changed", "port_closed": "no SSH server",
    "name_unknown": "name unknown", "no_route": "no route", "timeout": "no answer", "not_ssh": "not SSH",
    "stalled": "stalled", "user_refused": "user refused", "no_key_accepted": "no key", "password_only": "password only",
    "password_refused": "wrong password", "no_shell": "no shell", "dropped": "dropped",
}  # fmt: skip


def named(row: MachineRow, report: AccessReport | None) -> MachineRow:
    """Return a machine by the name that it told at its login, if its name has been its address or what this network
    calls it; a typed name stays."""
    host_name = re.sub(r"[^\w-]", "", report.host_name.partition(".")[0])[:64] if report is not None else ""
    is_guessed = is_address(row.name) or (THIS_NETWORK in row.found_by and is_address(row.entry.name))
    return replace(row, name=host_name) if is_guessed and host_name not in ("", "localhost") else row


def is_address(text: str) -> bool:
    """Whether a machine's name is an IP address."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def of_report(report: AccessReport) -> Assessment:
    """Assess the login to a machine; waiting for the user is a warning, not a failure."""
    if report.ok:
        return Assessment(status=ItemStatus.OK, words="ok")
    need = Access("", report=report).need
    status = ItemStatus.FAILED if need is AccessNeed.NOTHING else ItemStatus.WARNING
    words = "not approved" if need is AccessNeed.APPROVAL else _CAUSES.get(report.cause, "")
    return Assessment(status=status, words=words, cause=report.problem, fix=_fix(report, need))


def _fix(report: AccessReport, need: AccessNeed) -> str:
    if need is AccessNeed.APPROVAL:
        return "see what it can run on this computer, then approve it"
    host, _, port = report.where.rpartition(":")
    if need is AccessNeed.PASSWORD:
        destination = f"{report.user}@{host}" if port in ("", "22") else f"-p {port} {report.user}@{host}"
        return f"give its password once, to install a key (or install it yourself: ssh-copy-id {destination})"
    if report.unknown_key is not None:
        return f"compare on that machine: {report.unknown_key.compare_command}"
    if report.cause == "host_key_changed" and not report.fix:
        return f"if it was reinstalled: ssh-keygen -R {host}"
    return report.fix


def of_finding(finding: Finding) -> Assessment:
    if finding.is_unknown:
        return Assessment(status=ItemStatus.SKIPPED, words="unknown")
    status = _LEVELS[finding.level]
    return Assessment(status=status, cause=finding.seen if status is not ItemStatus.OK else "", fix=_fix_of(finding))


def _fix_of(finding: Finding) -> str:
    """Return the fix; for safe fixes the set-up's key binding, as the CLI command does not know machines typed here."""
    if not finding.safe:
        return finding.fix
    return f"{INSTALLS} ({finding.size})" if finding.size else INSTALLS


def of_findings(findings: Sequence[Finding]) -> Assessment:
    """Assess a machine by its worst finding."""
    problems = [finding for finding in findings if finding.level == "problem"]
    warnings = [finding for finding in findings if finding.level == "warning"]
    worst = next(iter(problems or warnings), None)
    if worst is None:
        return Assessment(status=ItemStatus.OK, words="ready")
    words = counted(len(problems), "problem") if problems else counted(len(warnings), "warning")
    return Assessment(status=_LEVELS[worst.level], words=words, cause=worst.seen, fix=_fix_of(worst))


# --------------------------------------------------------------------------------------------------------------- links


def of_pair(pair: PairFigures) -> Assessment:
    """Assess the link between two machines."""
    figures = pair.figures
    if pair.from_starter:  # this computer only copies and relays over it: there is nothing for the person to do
        return FINE
    if figures is None:
        cause = pair.problem or "no connection between the two"
        fix = "check firewalls between them; until then, their traffic is relayed"
        return Assessment(status=ItemStatus.FAILED, words="no connection", cause=cause, fix=fix)
    warnings = warnings_of(pair)
    fix = "a cable would help most" if figures.wireless or figures.wireless_back else ""
    status = ItemStatus.WARNING if warnings else ItemStatus.OK
    return Assessment(status=status, cause=warnings[0] if warnings else "", fix=fix)


def copying_text(pairs: Sequence[PairFigures]) -> str:
    """Return how fast this computer, which does not train, copies to the machines; empty where it trains."""
    rates = []
    for pair in pairs:
        if pair.from_starter and (figures := pair.figures) is not None:
            is_first = pair.labels[0] != pair.source
            mbit = figures.mbit if is_first else figures.mbit_back or figures.mbit
            rates.append(f"to {pair.labels[is_first]} {mbit_text(mbit)}")
    return f"This computer does not train, it copies: {', '.join(rates)}." if rates else ""


def of_pairs(pairs: Sequence[PairFigures]) -> Assessment:
    """Assess all links together, without a cause: each link shows its own."""
    weak = any(of_pair(pair).status is not ItemStatus.OK for pair in pairs)
    return Assessment(status=ItemStatus.WARNING) if weak else FINE


def path_of(pair: PairFigures) -> str:
    """Return which network path was measured; empty without a connection."""
    figures = pair.figures
    if figures is None:
        return ""
    medium = "Thunderbolt, " if pair.link.medium == "thunderbolt" else ""
    alternatives = f", the fastest of {len(figures.paths)} paths" if len(figures.paths) > 1 else ""
    return f"{medium}{figures.interface or '?'} to {figures.interface_back or '?'} ({figures.address}){alternatives}"


def warnings_of(pair: PairFigures) -> list[str]:
    """Return warnings about a link that is slower than it could be."""
    figures = pair.figures
    if figures is None or pair.from_starter:
        return []
    warnings = []
    wireless = [n for n, on in zip(pair.labels, (figures.wireless, figures.wireless_back), strict=True) if on]
    if wireless:
        warnings.append(f"Wi-Fi: {' and '.join(wireless)}")
    slow, fast = sorted((figures.mbit, figures.mbit_back))
    if fast > _ASYMMETRIC * slow and slow < _FAST_MBIT:
        rates = f"{mbit_text(slow)}, back {mbit_text(fast)}"
        warnings.append(f"slower one way: {rates}; check cable or Wi-Fi at both ends")
    if any(interface_kind(name) is PathKind.VPN for name in (figures.interface, figures.interface_back)):
        warnings.append("goes through a VPN")
    if figures.loses_large:
        warnings.append("small packets pass, large ones are lost: give both ends the same MTU")
    if pair.busy:
        warnings.append(f"other traffic of {rate_text(figures.other_mbit)} at that time: measure again when it is idle")
    lost = max(figures.loss, figures.loss_back)
    if lost > _LOST:
        warnings.append(f"{share_text(lost)} was lost and sent again")
    return warnings
