"""``access HOST...``: does each machine accept the login, and if not, why? A password, given once, installs a key."""

from __future__ import annotations

import getpass
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from app.cli.approval import read_hosts
from app.cli.arguments import AllHosts, HostNames, Json, TrustNew
from app.cli.terminal import PacedLines, answer, somebody
from app.console import answered_yes, command_line, ctrl_c_heard, raise_if_stopped, say, visible
from distributed.hosts.file import Hosts, hosts_as_listed, load_hosts, parse_hosts, split_address
from distributed.preparation.prepare import PrepareOptions
from distributed.ssh.access import AccessReport, Installed, check_all, explain, install_key
from distributed.ssh.connection import SshTarget, Trust
from distributed.ssh.errors import PasswordRefused, Stage
from distributed.ssh.keys.host_keys import COMPARED, HostKeyInfo
from profiles.errors import ExitCode, MusterError
from profiles.installation import USUAL_HOSTS

_PASSWORD_TRIES = 3
_NAME_WIDTH = 22
_STAGE_WIDTH = 10

_TOLD = (
    "ok", "where", "user", "cause", "problem", "fix", "fingerprint", "authenticated_by", "system", "password_possible",
)  # fmt: skip
"""Fields of a report that are copied to the document."""
Keys = set[bytes]
Reports = dict[str, AccessReport]
"""By the machine's name."""
"""Public keys in wire format: a machine has one per type, whatever its names."""


def access(
    hosts: HostNames = None, hosts_file: AllHosts = None, trust_new: TrustNew = False, as_json: Json = False
) -> ExitCode:
    """Check machines in parallel, ask the user what is needed, and show a row for each.

    Raises:
        BadInput: a name or the hosts file cannot be used.
    """
    targets = chosen(hosts or (), hosts_file, as_json)
    report_by_machine, installed = _open_up(targets, trust_new, somebody(as_json))
    report_by_machine |= {m.name: AccessReport(m.name, where="this machine") for m in targets.machines if m.is_local}
    reports = [report_by_machine[machine.name] for machine in targets.machines]
    code = ExitCode.DONE if all(report.ok for report in reports) else ExitCode.NOT_READY
    heading = f"{'MACHINE':{_NAME_WIDTH}}" + "".join(f"{stage.value.upper():{_STAGE_WIDTH}}" for stage in Stage) + "IS"
    lines = [line for report in reports for line in report_lines(report, installed.get(report.machine))]
    reached = [m.name for m in targets.machines if report_by_machine[m.name].ok and not m.is_local]
    if reached and hosts_file is None and hosts:
        lines.append(f"For example: {command_line('train', 'demo', '--hosts', ','.join(['localhost', *reached]))}")
    return answer(as_json, {"machines": [_document(report) for report in reports]}, [heading, *lines], code)


def set_up_login(hosts: Hosts) -> None:
    """Set up the login to machines with the person at the terminal (host keys, passwords), and report how it went."""
    reports, installed = _open_up(hosts, trust_new=False, person=True)
    for report in reports.values():
        for line in report_lines(report, installed.get(report.machine)):
            say(line)


def _open_up(hosts: Hosts, trust_new: bool, person: bool) -> tuple[Reports, dict[str, Installed]]:
    targets = [SshTarget.of(machine, hosts) for machine in hosts.machines if not machine.is_local]
    trusted: Keys = set()

    def trust(key: HostKeyInfo) -> bool:
        return _accept_new(key) if trust_new else key.blob in trusted or (person and _is_known(key))

    reports, installed = check_all(targets, trust=trust), dict[str, Installed]()
    if person:
        reports = _introduce(targets, reports, trust, trusted)
        reports = {target.name: _with_password(target, reports[target.name], trust, installed) for target in targets}
    return reports, installed


def chosen(names: Sequence[str], hosts_file: Path | None, as_json: bool) -> Hosts:
    """Return all machines of a hosts file, the named ones of it, or the typed ones.

    Without ``hosts_file`` a name that the usual hosts file lists is that machine, with its address, port and user.

    Raises:
        BadInput: a name or the file cannot be used.
    """
    if not names:
        return read_hosts(hosts_file or USUAL_HOSTS, named=hosts_file is not None, person=somebody(as_json))
    if hosts_file is None:
        return _listed_or_typed(names, as_json)
    hosts = read_hosts(hosts_file, named=True, person=False)
    machines = tuple(dict.fromkeys(hosts.machine(name) for name in names))
    return hosts.model_copy(update={"machines": machines})


def _listed_or_typed(names: Sequence[str], as_json: bool) -> Hosts:
    listed = {}
    if USUAL_HOSTS.is_file() and any("@" not in name for name in names):
        listed = {machine.name.casefold(): machine for machine in load_hosts(USUAL_HOSTS).machines}
    unlisted = [name for name in names if name.casefold() not in listed]
    entries = [{**split_address(name), "address": split_address(name)["name"], "name": name} for name in unlisted]
    typed = hosts_as_listed(parse_hosts(json.dumps({"machines": entries}), "HOST")) if entries else None
    entries_of_file = tuple(dict.fromkeys(listed[name.casefold()] for name in names if name.casefold() in listed))
    if typed is not None and not entries_of_file:
        return typed
    hosts = read_hosts(USUAL_HOSTS, named=False, person=somebody(as_json))
    return hosts.model_copy(update={"machines": (*entries_of_file, *(typed.machines if typed else ()))})


def _introduce(targets: Sequence[SshTarget], reports: Reports, trust: Trust, trusted: Keys) -> Reports:
    """Ask the user about the host keys of unknown machines, and check the accepted ones again.

    The questions come after the connections, so that no server waits for an answer and gives up.
    """
    asked: Keys = set()
    while True:
        unknown = [report.unknown_key for report in reports.values() if report.unknown_key is not None]
        new_keys = {key.blob: key for key in unknown if key.blob not in asked}
        if not new_keys:
            return reports
        asked.update(new_keys)
        trusted.update(blob for blob, key in new_keys.items() if _is_the_right_one(key))
        accepted = {name for name, r in reports.items() if r.unknown_key is not None and r.unknown_key.blob in trusted}
        reports |= check_all([target for target in targets if target.name in accepted], trust=trust)


def _accept_new(key: HostKeyInfo) -> bool:
    say(f"{visible(key.machine)}: accepting its {key.key_type} host key, new here: {key.fingerprint}")
    return True


def _is_known(key: HostKeyInfo) -> bool:
    """Whether the key was accepted before for the same machine under another name or address; reports it."""
    if key.known_as:
        say(f"{visible(key.machine)}: the same machine as {visible(', '.join(key.known_as))}, by its host key")
    return bool(key.known_as)


def trust(new: bool, person: bool | None = None) -> Trust | None:
    """Return the decision about unknown host keys: accept all, ask the user, or (``None``) refuse."""
    lock, accepted = threading.Lock(), Keys()

    def ask(key: HostKeyInfo) -> bool:
        with lock:
            raise_if_stopped()
            if key.blob in accepted or _is_known(key) or _is_the_right_one(key):
                accepted.add(key.blob)
            return key.blob in accepted

    return _accept_new if new else ask if (somebody() if person is None else person) else None


def prepare_options(
    person: bool, trust_new: bool = False, allow_missing: bool = False, offline_wheels: bool = False
) -> PrepareOptions:
    """Return the options for preparing machines, interactive if there is a user."""
    return PrepareOptions(
        tell=PacedLines(),
        trust=trust(trust_new, person),
        install_keys=set_up_login if person else None,
        allow_missing=allow_missing,
        missing_hint="to go on without it, add --allow-missing",
        offline_wheels=offline_wheels,
    )


def _is_the_right_one(key: HostKeyInfo) -> bool:
    say(f"{visible(key.machine)}: first contact; its {key.key_type} host key is")
    say(f"  {key.fingerprint}")
    say(f"compare it, to its end {key.fingerprint[-COMPARED:]}, with what this prints there: {key.compare_command}")
    return answered_yes("Do the two match?")


def _with_password(
    target: SshTarget, report: AccessReport, trust: Trust, installed: dict[str, Installed]
) -> AccessReport:
    """Ask for the password if the machine accepts one, and install our key with it."""
    if not report.password_possible:
        return report
    say(f"{visible(report.machine)}: {visible(report.problem)}")
    for left in reversed(range(_PASSWORD_TRIES)):
        prompt = (
            f"Password of {visible(report.user)} at {visible(report.where)} (once, to install a key; empty: skip): "
        )
        try:
            with ctrl_c_heard():
                password = getpass.getpass(prompt, stream=sys.stderr)
        except EOFError:
            password = ""
            say("")
        if not password:
            return report
        try:
            installation = installed[target.name] = install_key(target, password, trust=trust)
            return installation.report
        except PasswordRefused as error:
            failed = _failed(target, report, error)
            say(f"{visible(error.message)}{f'; {left} more tries' if left > 1 else '; one more try' if left else ''}")
        except MusterError as error:
            return _failed(target, report, error)
    return failed


def _failed(target: SshTarget, before: AccessReport, error: MusterError) -> AccessReport:
    return replace(explain(target, None, error), where=before.where, user=before.user)


def report_lines(report: AccessReport, installed: Installed | None) -> list[str]:
    words = {True: "ok", False: "FAILED", None: "-"}
    name = visible(report.machine)
    passed = "".join(f"{words[ok]:{_STAGE_WIDTH}}" for ok in report.stages.values())
    row = f"{passed}{visible(report.system or report.where if report.ok else '')[:18]}".rstrip()
    padding = _NAME_WIDTH - cell_len(name)
    lines = [name + " " * padding + row] if padding > 0 else [name, " " * _NAME_WIDTH + row]
    if installed is not None:
        done = "was added to" if installed.added else "is already in"
        lines.append(f"  Muster's key {installed.key.path} {done} its ~/.ssh/authorized_keys")
    if not report.ok:
        lines.append(f"  {visible(report.problem)}")
        lines += [f"  fix: {visible(report.fix)}"] if report.fix else []
    return lines


def _document(report: AccessReport) -> dict[str, Any]:
    stages = {stage.value: passed for stage, passed in report.stages.items()}
    return {
        "name": report.machine,
        **{name: getattr(report, name) for name in _TOLD},
        "stages": stages,
        "seconds": round(report.seconds, 3),
    }
