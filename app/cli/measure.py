"""``measure PROFILE``: how fast the machines train, and how fast the links between them are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiles.errors import ExitCode

if TYPE_CHECKING:
    from distributed.hosts.schema import Hosts
    from distributed.measuring.link_figures import PairFigures
    from distributed.measuring.measure import Measured
    from distributed.planning.cluster import Machine
    from profiles.schema import Profile


def measure(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile of config.ini or a saved one.")],
    hosts: Annotated[
        Path | None,
        typer.Option("--hosts", metavar="FILE", help="The machines; empty: the profile's, or this one alone."),
    ] = None,
    links: Annotated[bool, typer.Option("--links", help="Measure the links only.")] = False,
    machines: Annotated[bool, typer.Option("--machines", help="Measure the machines only.")] = False,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any option of the profile; may be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the figures for 'plan --figures'.")
    ] = None,
    max_age: Annotated[
        float, typer.Option("--max-age", metavar="HOURS", min=0, help="Earlier figures that are not older will do.")
    ] = 24.0,
    trust_new: Annotated[
        bool, typer.Option("--trust-new", help="Accept the host keys of machines never met before.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
    ] = False,
) -> ExitCode:
    """Measure links and machines: the actual task for a moment on each, and raw TCP between every two."""
    from app.cli.distributed import trust
    from app.cli.option_flags import merged_overrides
    from app.console import say
    from distributed.measuring.measure import Wish
    from distributed.measuring.measure import measure as measure_all
    from distributed.planning.job import write_figures
    from profiles.resolve import load_profile

    chosen = load_profile(profile, merged_overrides(settings, {}, {})).profile
    both = links == machines
    wish = Wish(links or both, machines or both, max_age * 3600)
    found = measure_all(machines_of(hosts, chosen), chosen, wish, trust(trust_new), say)
    if out is not None:
        write_figures(out, found.figures)
    code = ExitCode.NOT_READY if found.problems else ExitCode.DONE
    _tell(found, code, as_json)
    if out is not None:
        say(f"written to {out}")
    return code


def machines_of(file: Path | None, profile: Profile) -> Hosts:
    """Return the machines of a hosts file: the one given, the profile's, or the usual one; without any this machine.

    Raises:
        BadInput: the file cannot be read or used.
    """
    from app.cli.train import USUAL_HOSTS
    from distributed.hosts.file import load_hosts
    from distributed.machine.here import this_machine

    chosen = file or (Path(profile.run.hosts) if profile.run.hosts else USUAL_HOSTS)
    return this_machine() if chosen is USUAL_HOSTS and not chosen.is_file() else load_hosts(chosen)


def _tell(found: Measured, code: ExitCode, as_json: bool) -> None:
    from app.console import say_error, show_json, show_line

    if as_json:
        show_json(_document(found) | {"exit_code": int(code)})
        return
    for line in (*matrix_lines(found), *speed_lines(found), *remark_lines(found)):
        show_line(line)
    for problem in found.problems:
        say_error(problem.message, problem.hint)


def _document(found: Measured) -> dict[str, Any]:
    return {
        "links": [pair.model_dump(mode="json") | {"busy": pair.busy} for pair in found.pairs],
        "machines": [one.machine.model_dump(mode="json") for one in found.speeds],
        "workload": found.speeds[0].workload.model_dump(mode="json") if found.speeds else None,
        "problems": [{"message": problem.message, "hint": problem.hint} for problem in found.problems],
    }


def matrix_lines(found: Measured) -> list[str]:
    """Return Mbit/s and milliseconds of every pair: rows send, columns receive."""
    from app.console import visible

    if not found.pairs:
        return []
    cells: dict[tuple[str, str], str] = {}
    for pair in found.pairs:
        link, mark = pair.link, "*" if pair.busy else ""
        for source, target, mbit in (
            (pair.source, pair.target, link.mbit),
            (pair.target, pair.source, link.mbit_back),
        ):
            cells[source, target] = f"{mbit:.0f}{mark} / {link.rtt_ms:.1f}" if pair.figures else "-"
    rows = [["Mbit/s / ms", *(visible(name) for name in found.names)]]
    rows += [[visible(one), *(cells.get((one, other), "") for other in found.names)] for one in found.names]
    return aligned(rows)


def speed_lines(found: Measured) -> list[str]:
    """Return a row a machine: speed at each batch size, memory at its peak."""
    from app.console import visible

    if not found.speeds:
        return []
    rows = [["machine", "device", "batch", "samples/s", "peak memory", "cores"]]
    rows += [[visible(one.machine.name), *_speed_cells(one.machine)] for one in found.speeds]
    return [*([""] if found.pairs else []), *aligned(rows)]


def _speed_cells(machine: Machine) -> list[str]:
    from app.console import bytes_text

    measured = machine.measurements
    return [
        machine.device,
        ", ".join(str(one.batch) for one in measured),
        ", ".join(f"{one.batch / one.seconds:.1f}" for one in measured),
        bytes_text(max(one.peak for one in measured)),
        f"{machine.cores:g}",
    ]


def aligned(rows: list[list[str]]) -> list[str]:
    """Return lines with columns of equal width, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) if not number else cell.rjust(width)
                  for number, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def remark_lines(found: Measured) -> list[str]:
    """Return what the figures do not tell: links that were busy or dead, and pairs with several ways."""
    from app.console import visible

    said = []
    for pair in found.pairs:
        ends = f"{visible(pair.source)} - {visible(pair.target)}"
        if pair.problem:
            said.append(f"{ends}: nothing passes ({visible(pair.problem)})")
        if pair.busy and pair.figures is not None:
            said.append(f"* {ends}: others moved {pair.figures.other_mbit:.0f} Mbit/s there; measure again when idle")
        said += _way_lines(ends, pair)
    return ["", *said] if said else []


def _way_lines(ends: str, pair: PairFigures) -> list[str]:
    """Say which of several ways between two machines was the best: runs take it."""
    from app.console import visible

    found = pair.figures
    if found is None or len(found.paths) < 2:
        return []
    lines = [f"{ends}: the fastest of {len(found.paths)} ways, which runs take, is the first"]
    for address, near, far, mbit in sorted(found.paths, key=lambda way: way[0] != found.address):
        lines.append(f"  {visible(near) or '?'} to {visible(far) or '?'}, {visible(address)}: {mbit:.0f} Mbit/s")
    return lines
