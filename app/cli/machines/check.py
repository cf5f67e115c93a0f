"""``distributed-check`` and ``clean``: check which machines are ready and fix what is safe to fix; remove everything
of Muster's from them: shown first, then removed, then verified."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.approval import read_hosts
from app.cli.arguments import AllHosts, CheckedHosts, HostNames, Json, TrustNew, Yes
from app.cli.machines.access import chosen, trust
from app.cli.terminal import answer, confirmed, somebody
from app.console import command_line, say, say_error, show_line, visible
from distributed.cleaning.clean import PREPARED, Inventory, remove, survey
from distributed.hosts.file import Hosts, Machine
from distributed.hosts.past_logins import forget_login
from distributed.machine.link import CACHE, MachineLink, link_to
from distributed.machine.pool import ConnectionPool
from distributed.ssh.access import own_key_path, read_own_key
from profiles.errors import BadInput, ExitCode, MusterError, counted
from profiles.installation import USUAL_HOSTS, program
from profiles.quantities import bytes_text, duration_text, offset_text
from profiles.schema import DEFAULT_TASK

if TYPE_CHECKING:
    from distributed.checks.examination import MachineExamination


def distributed_check(
    profile: Annotated[str, typer.Argument(metavar="[PROFILE]", help="Check for this profile's task.")] = "",
    hosts: CheckedHosts = None,
    fix: Annotated[bool, typer.Option("--fix", help="Install missing packages into Muster's folder there.")] = False,
    offline_wheels: Annotated[
        bool, typer.Option("--offline-wheels", help="With --fix: send the packages from this machine.")
    ] = False,
    trust_new: TrustNew = False,
    as_json: Json = False,
) -> ExitCode:
    """Check all machines of a hosts file; without a profile, for speech recognition.

    Raises:
        BadInput: the hosts file or the profile cannot be used.
    """
    from distributed.checks.examination import examine, repair
    from training.tasks.published_models import usable_profile

    try:
        job = usable_profile(profile, tell=say).profile if profile else None
    except BadInput as refusal:
        if hosts is not None or not refusal.hint.startswith("known: "):  # another fault, or a misspelt profile
            raise
        line = command_line("distributed-check", "--hosts", profile)
        raise BadInput(refusal.message, f"if it is a machine, type: {line}") from refusal
    task = job.model.task if job else DEFAULT_TASK
    machines = read_hosts(hosts or USUAL_HOSTS, named=hosts is not None, person=somebody(as_json))
    with ConnectionPool() as pool:
        dial = partial(link_to, pool=pool)
        examined_machines = examine(machines, task, trust(trust_new), job, dial)
        if (fix or offline_wheels) and any(examined.readiness.provisionable for examined in examined_machines):
            for error in repair(examined_machines, lambda line: say(visible(line)), offline_wheels):
                say_error(error.message, error.hint)
            examined_machines = examine(machines, task, trust(trust_new), job, dial)
    repeated = command_line("distributed-check", *filter(None, (profile,)), *(("--hosts", str(hosts)) if hosts else ()))

    def mend(fix: str) -> str:
        """Return a fix whose command is for the machines of this one, to be pasted."""
        return fix.replace(program("distributed-check"), repeated)

    for examined in () if as_json else examined_machines:
        _show(examined, mend)
    code = ExitCode.DONE if all(examined.ready for examined in examined_machines) else ExitCode.NOT_READY
    return answer(as_json, {"machines": [_check_document(examined, mend) for examined in examined_machines]}, (), code)


def _show(examined: MachineExamination, mend: Callable[[str], str]) -> None:
    problem = examined.readiness.problem
    if problem is not None:
        say_error(problem.message, mend(problem.hint))
    elif examined.ready:
        facts = examined.readiness.facts
        assert facts is not None
        python = ".".join(map(str, facts.python))
        gpus = f", {facts.gpus} CUDA devices" if facts.gpus else ""
        disk_and_clock = f"{bytes_text(facts.free)} free, clock {offset_text(facts.clock_ahead)}"
        show_line(
            visible(
                f"{examined.name}: ready ({facts.system}, Python {python}, torch {facts.torch}{gpus}, {disk_and_clock})"
            )
        )
    for finding in examined.findings:
        if finding.level == "problem" and finding.check != "ready":
            say_error(f"{examined.name}: {visible(finding.seen)}", mend(finding.fix))
        elif finding.level == "warning":
            needed = f" (needed: {finding.needed})" if finding.needed else ""
            fix = f"; {mend(finding.fix)}" if finding.fix else ""
            show_line(f"{examined.name}: warning: {visible(f'{finding.seen}{needed}{fix}')}")


def _check_document(examined: MachineExamination, mend: Callable[[str], str]) -> dict[str, object]:
    readiness, facts = examined.readiness, examined.readiness.facts
    document: dict[str, object] = {"name": examined.name, "ready": examined.ready}
    if readiness.problem is not None:
        document |= {"problem": readiness.problem.message, "fix": mend(readiness.problem.hint)}
    elif facts is not None:
        document |= {"torch": facts.torch, "python": list(facts.python), "free_bytes": facts.free,
                     "clock_ahead": facts.clock_ahead, "gpus": facts.gpus}  # fmt: skip
    findings = [finding._replace(fix=mend(finding.fix)) for finding in examined.findings]
    return document | {"findings": [finding._asdict() for finding in findings]}


_AT_ONCE = 32


@dataclass
class CleaningCase:
    """One machine to clean: what was found there, what is left, or why it could not be reached."""

    machine: Machine
    link: MachineLink | None = None
    inventory: Inventory | None = None
    left: Inventory | None = None
    problem: MusterError | None = None

    @property
    def is_clean(self) -> bool:
        """Whether nothing of Muster is there."""
        newest = self.left or self.inventory
        return self.problem is None and newest is not None and newest.empty

    @property
    def roots(self) -> tuple[str, ...]:
        """Folders of Muster there."""
        return tuple(dict.fromkeys((CACHE, self.machine.project_path or CACHE)))

    def size_left(self, blob: str) -> int | None:
        """Return the bytes that are still to be removed; ``None``: the machine does not say."""
        with contextlib.suppress(MusterError):
            if self.link is not None:
                return survey(self.link.connection(), blob, self.roots).removable_size
        return None

    def work(self, hosts: Hosts, blob: str) -> None:
        """Take the inventory, or remove what it lists; ``blob`` is our public key."""
        try:
            if self.link is None:
                self.link = link_to(self.machine, hosts)
            if self.inventory is None:
                self.inventory = survey(self.link.connection(), blob, self.roots)
            else:
                self.left = remove(self.link.connection(), blob, self.inventory, self.roots)
        except MusterError as error:
            self.problem = error


def clean(hosts: HostNames = None, hosts_file: AllHosts = None, yes: Yes = False, as_json: Json = False) -> ExitCode:
    """Show what Muster has stored on machines, ask, remove it, and verify that nothing is left.

    Raises:
        BadInput: a name or the hosts file cannot be used, or nobody is there to confirm and no ``--yes``.
    """
    targets = chosen(hosts or (), hosts_file, as_json)
    key = read_own_key()
    blob = key.blob if key else ""
    cases = [CleaningCase(machine) for machine in targets.machines]
    with ThreadPoolExecutor(min(len(cases), _AT_ONCE)) as pool:
        try:
            list(pool.map(lambda case: case.work(targets, blob), cases))
            for case, inventory in [
                (case, case.inventory) for case in cases if case.inventory is not None and not as_json
            ]:
                amount = "nothing of Muster's" if inventory.empty else f"{bytes_text(inventory.size)} of Muster's"
                show_line(f"{visible(case.machine.name)}: {amount}")
                for line in _inventory_lines(inventory):
                    show_line(f"  {line}")
            to_clean = [case for case in cases if case.inventory is not None and not case.inventory.empty]
            machines = f"{counted(len(to_clean), 'machine')} to clean"
            if to_clean and (yes or confirmed("remove all of this for good?", machines, as_json=as_json)):
                removals = {pool.submit(case.work, targets, blob): case for case in to_clean}
                if not as_json:
                    tell_removal(removals, blob)
                for removal in removals:
                    removal.result()
            for case in cases:
                if case.is_clean:
                    forget_login(case.machine.host, case.machine.port)
            return _tell(cases, as_json)
        finally:
            for case in cases:
                if case.link is not None:
                    case.link.close()


def tell_removal(removals: Mapping[Future[None], CleaningCase], blob: str, interval: float = 5.0) -> None:
    """Say what is being removed until all is done: every ``interval`` seconds how much is still there."""
    begun, pending = time.monotonic(), set(removals)
    for case in removals.values():
        size = bytes_text(case.inventory.removable_size) if case.inventory else ""
        say(f"{visible(case.machine.name)}: removing {size}, then looking for what is left ...")
    while pending := wait(pending, interval).not_done:
        for case in (case for removal, case in removals.items() if removal in pending):
            left, passed = case.size_left(blob), duration_text(time.monotonic() - begun)
            if left is not None:
                say(f"{visible(case.machine.name)}: {bytes_text(left)} left after {passed}")


def _inventory_lines(inventory: Inventory) -> list[str]:
    lines = []
    sizes: Counter[str] = Counter()
    for entry in inventory.parts:
        if entry.kind == "run":
            run = entry.path.rpartition("/")[2]
            note = "running: not touched" if run in inventory.alive else "ended; its snapshots there go too"
            lines.append(f"{bytes_text(entry.size):>8}  run {visible(run)} ({note})")
        else:
            sizes[entry.kind] += entry.size
    folders = ", ".join(visible(root) for root, _ in inventory.roots)
    kept_note = " (kept while a run is running)" if inventory.alive else ""
    lines = [f"{bytes_text(size):>8}  {kind} in {folders}{kept_note}" for kind, size in sizes.items()] + lines
    lines += [f"{'process':>8}  {process.pid} {visible(process.command)[:60]}" for process in inventory.processes]
    lines += [f"{'key':>8}  {visible(path)}{kept_note}" for path in inventory.keys]
    lines += [
        f"{'-':>8}  the key of {visible(comment)} belongs to another machine: kept" for comment in inventory.foreign
    ]
    return lines + [f"{'-':>8}  {visible(path)} is not Muster's: kept" for path in inventory.left_alone]


def _tell(cases: Sequence[CleaningCase], as_json: bool) -> ExitCode:
    clean = all(case.is_clean for case in cases)
    for case in () if as_json else cases:
        if case.problem is not None:
            say_error(case.problem.message, case.problem.hint)
        elif case.left is not None:
            for line in _left_lines(case.left):
                show_line(f"{visible(case.machine.name)}: {line}")
        elif case.inventory is not None and not case.inventory.empty:
            show_line(f"{visible(case.machine.name)}: nothing was removed")
    if (
        any(case.inventory and case.inventory.keys and case.left and not case.left.keys for case in cases)
        and not as_json
    ):
        say(f"the private key stays here, for other machines: {own_key_path()}")
    code = ExitCode.DONE if clean else ExitCode.NOT_READY
    return answer(as_json, {"machines": [_document(case) for case in cases]}, (), code)


def _left_lines(left: Inventory) -> Iterator[str]:
    if left.empty:
        yield "nothing of Muster is left"
    machines = visible(", ".join(left.elsewhere))
    location = f" (on {machines}, which shares this folder)" if machines else ""
    for run in left.alive:
        stop_hint = "" if run == PREPARED else f"; end it first: {command_line('runs', 'stop', run)}"
        yield f"run {visible(run)} is still running{location} and was not touched{stop_hint}"
    remains = [entry.path for entry in left.parts] + [f"process {process.pid}" for process in left.processes]
    for remnant in [*remains, *left.keys] if not left.alive else []:
        yield f"still there: {visible(remnant)}"


def _document(case: CleaningCase) -> dict[str, Any]:
    problem = {"problem": case.problem.message, "fix": case.problem.hint} if case.problem else {}
    inventories = {"found": _inventory_document(case.inventory), "left": _inventory_document(case.left)}
    return {"name": case.machine.name, "clean": case.is_clean, **inventories, **problem}


def _inventory_document(inventory: Inventory | None) -> dict[str, Any] | None:
    if inventory is None:
        return None
    document = asdict(inventory)
    entries = [{"path": part["path"], "bytes": part["size"], "kind": part["kind"]} for part in document["parts"]]
    foreign, _ = document.pop("foreign"), document.pop("roots")
    return {**document, "parts": entries, "foreign_keys": foreign}
