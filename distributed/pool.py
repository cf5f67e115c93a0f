"""``Pool.host``: training from Python on this computer and on those that join it with a code.

::

    if __name__ == "__main__":
        model = Pool.host(build_model, train_dataset).train(epochs=3)

and on each other machine ``python -m muster join CODE``. All of it is a ``NetworkTrainer`` whose machines have joined;
one that comes later is added to the run, one that leaves is a lost member. A worker that imports the script imports
this module too, so it imports nothing of machines and SSH at its top.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.network_trainer import NetworkTrainer
from profiles.errors import BadInput, MusterError
from training.records.events import Event, StepEvent
from training.records.plan import RunPlan
from training.run.outcome import RunOutcome

if TYPE_CHECKING:
    from torch import nn

    from distributed.hosts.lending import LendClass
    from distributed.joining.share_client import OpenShare

__all__ = ["Pool"]

LEAST: LendClass = "friend"
"""The strictest class of machines that train a script's own model: its code is sent to them."""
Admit = Callable[[str], bool]


class Pool:
    """This computer and the machines that join it; made by :meth:`host`."""

    def __init__(self, trainer: _PoolTrainer, machines: int, admit: Admit) -> None:
        self.trainer = trainer
        self._machines, self._invitations = machines, _Invitations(admit)

    @classmethod
    def host(
        cls,
        model: Any,
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        machines: int = 1,
        admit: Admit | None = None,
        **settings: Any,
    ) -> Pool:
        """Return a pool that trains a model on this computer and on those that join.

        Args:
            model: as :class:`distributed.network_trainer.NetworkTrainer` takes it, and so are ``train_dataset``,
                ``val_dataset`` and ``settings``.
            machines: how many machines must have joined before training begins; others may join later.
            admit: decides whether a machine may join, by a line that describes it; default: asks at the terminal.

        Raises:
            BadInput: ``machines`` is below 1.
        """
        if machines < 1:
            raise BadInput(f"machines={machines}: at least one machine joins", "for this computer alone: LocalTrainer")
        return cls(_PoolTrainer(model, train_dataset, val_dataset, **settings), machines, admit or _asked)

    def train(self, strategy: Any = "auto", **options: Any) -> nn.Module:
        """Wait until the machines have joined, then train and return the model.

        Args:
            strategy: as :meth:`training.local_trainer.ObjectTrainer.fit` takes it, and so are ``options``; what is
                raised stands there, too.

        Raises:
            MachinesNotReady: no code can be opened.
        """
        joined = self._invitations.wait_for(self._machines)
        self.trainer.takes(joined)
        self.trainer.on_start = lambda path: self._invitations.go_on(lambda address: _add(path, address))
        try:
            return self.trainer.fit(strategy, **options)
        finally:
            self._invitations.close()


class _PoolTrainer(NetworkTrainer):
    """Trains on this computer and on machines that have joined."""

    on_start: Callable[[Path], None] = staticmethod(lambda path: None)
    """Called with the run's folder once it trains: only then it takes newcomers."""

    def takes(self, addresses: list[str]) -> None:
        """Train on this computer and on these."""
        self._hosts = Path(",".join(("localhost", *addresses)))

    def _to_the_end(self, path: Path, plan: RunPlan, reported_events: int = 0) -> RunOutcome:
        report, has_started = self._on_event, False

        def on_event(event: Event) -> None:
            nonlocal has_started
            report(event)
            if isinstance(event, StepEvent) and not has_started:
                has_started = True
                self.on_start(path)

        self._on_event = on_event
        return super()._to_the_end(path, plan, reported_events)


class _Invitations:
    """Codes, one after another, each for one machine."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit
        self._lock = threading.Lock()
        self._is_closed = False
        self._offer: OpenShare | None = None

    def wait_for(self, count: int) -> list[str]:
        """Return the addresses of ``count`` machines as soon as they have joined."""
        joined: list[str] = []
        while len(joined) < count:
            if (address := self._invite()) and address not in joined:
                joined.append(address)
        return joined

    def go_on(self, take: Callable[[str], None]) -> None:
        """Invite further machines in the background, until this is closed."""

        def invite() -> None:
            with contextlib.suppress(MusterError):  # no door, or too many codes: the run goes on without newcomers
                while not self._is_closed:
                    if address := self._invite():
                        take(address)

        threading.Thread(target=invite, name="invitations", daemon=True).start()

    def _invite(self) -> str:
        """Open a code, and return the address of the machine that has joined with it; empty: none has."""
        from distributed.hosts.joined import SUFFIX
        from distributed.hosts.lending import permits
        from distributed.joining.share_client import Applicant, Joined, OpenShare, described, door_addresses

        with contextlib.closing(OpenShare()) as offer:
            with self._lock:
                if self._is_closed:
                    return ""
                self._offer = offer
            _say(f"on another machine: python -m muster join {offer.code} --lend {LEAST}")
            _say("where that machine has no box for programs, and is yours: --lend own")
            _say(f"if it does not find this computer: --at {' or '.join(door_addresses(offer)) or 'ADDRESS'}")
            for event in offer.events():
                if isinstance(event, Applicant) and not permits(event.introduction.lend, LEAST):
                    _say(f"{event.introduction.name} lends itself for tasks alone, and this is code: --lend {LEAST}")
                    offer.answer(False)
                elif isinstance(event, Applicant):
                    offer.answer(self._admit(f"{described(event.introduction)} at {event.address}"))
                elif isinstance(event, Joined):
                    _say(f"{event.name} has joined")
                    return f"{event.name}{SUFFIX}"
        return ""

    def close(self) -> None:
        """Withdraw the open code, and invite nobody any more."""
        with self._lock:
            self._is_closed = True
            offer = self._offer
        if offer is not None:
            offer.close()


def _add(path: Path, address: str) -> None:
    """Ask the run in ``path`` to take one more machine."""
    from distributed.hosts.file import typed_machine
    from training.run.requests.request_book import leave_request

    leave_request(path, "add", entry=typed_machine(address))


def _asked(described: str) -> bool:
    from distributed.joining.share_client import TRUST

    for line in (f"{described} wants to join this computer", *TRUST):
        _say(line)
    try:
        return input("Admit it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _say(line: str) -> None:
    text = line.encode("unicode_escape").decode() if not line.isprintable() else line
    print(text, file=sys.stderr, flush=True)
