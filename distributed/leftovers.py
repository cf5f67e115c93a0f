"""The proof that nothing of a run is left: every machine is asked for the run's processes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from distributed.hosts_schema import Hosts, Machine
from distributed.link import link_to
from profiles.errors import MusterError


def leftovers(hosts: Hosts, run_id: str) -> dict[str, list[str] | MusterError]:
    """Return, by machine, the processes of a run that still run there, or why it could not be asked."""

    def ask(machine: Machine) -> list[str] | MusterError:
        link = link_to(machine, hosts)
        try:
            link.put_agent()
            return list(json.loads(link.ask("left", run_id).stdout)["processes"])
        except MusterError as error:
            return error
        finally:
            link.close()

    with ThreadPoolExecutor(len(hosts.machines)) as pool:
        return dict(zip((machine.name for machine in hosts.machines), pool.map(ask, hosts.machines)))
