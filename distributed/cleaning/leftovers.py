"""The proof that nothing of a run is left: every machine is asked for the run's processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import document, link_to
from distributed.ssh.errors import SshError
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
            left = document(machine.name, link.ask("left", run_id).stdout).get("processes")
            if not isinstance(left, list):
                raise SshError(machine.name, "it did not report which processes are left", "check there with ps -ax")
            return [str(process) for process in left]
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
