"""The machine of ``plan_accuracy.py`` that somebody sits at: measures, and starts runs, as the command line does there.

Runs inside a lab host, started by ``plan_lab.py``. Orders are JSON lines on standard input, each answered by one JSON
line::

    {"op": "speeds", "cache": FOLDER, ...}   -> {"measured": [...]}   figures of every machine
    {"op": "links", "cache": FOLDER, ...}    -> {"measured": [...]}   figures of every pair
    {"op": "run", "batches": {...}, ...}     -> {"folder": ...}       when the supervisor has it

Every order has ``hosts`` (a hosts file) and ``options`` of the profile.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed.hosts.schema import Hosts
from distributed.launcher import DistributedLauncher
from distributed.measuring.measure import MeasureOptions, measure
from distributed.planning.documents.cluster import MeasurementCache
from profiles.errors import MusterError
from profiles.files.resolve import load_profile
from profiles.schema import Profile

PROFILE = "nanogpt"


def _measure(order: dict[str, Any], hosts: Hosts, profile: Profile) -> dict[str, Any]:
    links = order["op"] == "links"
    cache = MeasurementCache(Path(order["cache"]))
    found = measure(hosts, profile, MeasureOptions(links=links, machines=not links, cache=cache))
    if found.problems:
        raise found.problems[0]
    return {"measured": [one.model_dump(mode="json") for one in (found.pairs if links else found.speeds)]}


def _run(order: dict[str, Any], hosts: Hosts, profile: Profile) -> dict[str, Any]:
    """Start a run with the plan's shares."""
    launcher = DistributedLauncher(hosts, profile)
    planned = launcher.plan()
    members = [m.model_copy(update={"batch_size": order["batches"][m.name]}) for m in planned.plan.members]
    plan = planned.plan.model_copy(update={"members": tuple(members)})
    return {"folder": str(launcher.start(replace(planned, plan=plan), sys.argv))}


def main() -> None:
    """Carry out orders until there are no more."""
    for line in sys.stdin:
        order = json.loads(line)
        hosts = Hosts.model_validate(order["hosts"])
        profile = load_profile(PROFILE, order["options"]).profile
        try:
            answer = (_run if order["op"] == "run" else _measure)(order, hosts, profile)
        except MusterError as error:
            answer = {"error": f"{error.message} ({error.hint})"}
        print(json.dumps(answer), flush=True)
