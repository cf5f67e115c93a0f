"""Checks data that stay on machines: whether each has some to train on, with the same columns as the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distributed.agent.requests import InspectData
from distributed.checks.findings import Finding
from distributed.machine.link import MachineLink, Tell
from distributed.preparation.preflight import NotReady
from distributed.ssh.errors import SshError
from profiles.errors import BadInput, MusterError
from profiles.schema import Profile
from training.records.plan import MemberPlan
from training.tasks.registry import inputs_of

_TIMEOUT = 60.0
_Name = Annotated[str, Field(max_length=200)]
_STAY = "they stay there; only weights or gradients leave it"


class LocalData(BaseModel):
    """Report of :mod:`distributed.agent.data_probe`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, Field(max_length=4096)]
    problem: _Name
    columns: tuple[_Name, ...] = Field(max_length=1000)


def require_data(
    profile: Profile, links: Sequence[MachineLink], members: Sequence[MemberPlan], tell: Tell = lambda line: None
) -> None:
    """Refuse machines without data, where data stay on machines; ``tell`` gets what the others have.

    Raises:
        NotReady: a machine has no usable data.
    """
    by_machine = machine_data_findings(profile, links, members)
    findings = [(link, finding) for link in links for finding in by_machine[link.name]]
    problems = [SshError(link.name, f.seen, f.fix) for link, f in findings if f.level == "problem"]
    if problems:
        raise NotReady(problems)
    for link, finding in findings:
        tell(f"{link.name}: {finding.seen}" + (f" ({finding.fix})" if finding.fix else ""))


def machine_data_findings(
    profile: Profile, links: Sequence[MachineLink], members: Sequence[MemberPlan]
) -> dict[str, list[Finding]]:
    """Return findings about local data by machine; empty where data do not stay there, or no path is known."""
    locations = dict.fromkeys((member.machine, member.data) for member in members if member.data)
    queries = [(link, path) for link in links for machine, path in locations if machine == link.name]
    with ThreadPoolExecutor(len(queries) or 1) as pool:
        results = pool.map(lambda query: _inspect(*query), queries)
        outcomes = {(link.name, path): result for (link, path), result in zip(queries, results)}
    columns = {location: seen.columns for location, seen in outcomes.items() if isinstance(seen, LocalData)}
    findings: dict[str, list[Finding]] = {link.name: [] for link in links}
    for location, outcome in outcomes.items():
        finding = outcome if isinstance(outcome, Finding) else judge_machine_data(profile, location, outcome, columns)
        findings[location[0]].append(finding)
    return findings


def _inspect(link: MachineLink, path: str) -> LocalData | Finding:
    try:
        return LocalData.model_validate_json(link.run(InspectData(path), timeout=_TIMEOUT).stdout)
    except ValidationError:
        return Finding("data", "warning", f"its data at {path} could not be checked: its answer cannot be read")
    except MusterError as error:
        return Finding("data", "warning", f"its data at {path} could not be checked: {error.message_for(link.name)}")


def judge_machine_data(
    profile: Profile, location: tuple[str, str], seen: LocalData, columns: Mapping[tuple[str, str], tuple[str, ...]]
) -> Finding:
    """Return the finding about the data of one machine.

    Args:
        location: machine and path.
        columns: columns of the tables at all locations.
    """
    if seen.problem:
        fix = "put the data there, or name another place with 'data' of this machine in the hosts file"
        return Finding("data", "problem", f"its data: {seen.path} {seen.problem}", "data of its own", fix)
    if seen.columns:
        try:
            inputs_of(profile.model.task).check_columns(profile, Path(seen.path), seen.columns)
        except BadInput as error:
            return Finding(
                "data",
                "problem",
                error.message,
                "the columns that the task reads",
                f"{error.hint}, or rename the column there",
            )
    others = Counter(frozenset(names) for other, names in columns.items() if other != location and names)
    common_columns, count = (others.most_common(1) or [(frozenset[str](), 0)])[0]
    if seen.columns and count and common_columns != frozenset(seen.columns):
        example = next(
            other for other, names in columns.items() if other != location and frozenset(names) == common_columns
        )
        difference = (
            f"its table has the columns {', '.join(seen.columns)}, that of {example[0]} {', '.join(columns[example])}"
        )
        return Finding(
            "data", "warning", difference, "the same columns on all machines", "rename them there if they mean the same"
        )
    return Finding("data", "ok", f"its data: {seen.path}; {_STAY}")
