"""The proof that nothing of a run is left: every machine is asked for the run's processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import link_to
from profiles.errors import MusterError


def leftovers(
    hosts: Hosts, run_id: str, first: Callable[[], None] = lambda: None
) -> dict[str, list[str] | MusterError]:
    """Return, by machine, the processes of a run that still run there, or why it could not be asked.

    Args:
        hosts: the machines.
        run_id: the run.
        first: done before they are asked, while the connections are made already.
    """
    done = threading.Event()

    def ask(machine: Machine) -> list[str] | MusterError:
        link = link_to(machine, hosts)
        try:
            link.put_agent()
            done.wait()
            return list(json.loads(link.ask("left", run_id).stdout)["processes"])
        except MusterError as error:
            return error
        finally:
            link.close()

    with ThreadPoolExecutor(len(hosts.machines)) as pool:
        answers = pool.map(ask, hosts.machines)
        try:
            first()
        finally:
            done.set()
        return dict(zip((machine.name for machine in hosts.machines), answers))
