"""The hosts file as data: how to log in to each machine, and what a person wants of it. A run writes neither: what was
chosen and measured stands in its plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from profiles.errors import BadInput
from profiles.options import hint_for

HERE = ("localhost", "127.0.0.1", "::1")

_UNSHOWN = r"/\\\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e"
_Name = Annotated[str, StringConstraints(pattern=rf"^[^.{_UNSHOWN}][^{_UNSHOWN}]*$", max_length=64)]
_Address = Annotated[str, StringConstraints(pattern=r"^([\w:][\w.:%-]*)?$", max_length=255)]
_User = Annotated[str, StringConstraints(pattern=r"^([^\s@:/\x00-\x1f-][^\s@:/\x00-\x1f]*)?$", max_length=64)]
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]*$", max_length=4096)]
_Device = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$")]
_Interface = Annotated[str, StringConstraints(pattern=r"^[\w.:@-]*$", max_length=64)]


def short(text: str, limit: int = 80) -> str:
    """Return the text in one line, cut for a message."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return a hint: the allowed word that was probably meant, or all of them."""
    names = list(allowed)
    return hint_for(word, names, f"known: {short(', '.join(names), 200)}")


class Machine(BaseModel):
    """One machine. Everything but the name may be empty; ``~`` is expanded where the path is used, not here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    """Name of the machine in messages, logs and tables; unique."""
    address: _Address = ""
    """Destination as typed after ``ssh``; empty: the name."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = None
    """Port of its SSH server; ``None``: from ~/.ssh/config, else 22."""
    user: _User = ""
    """User to log in as; empty: from ~/.ssh/config, else the user of this machine."""
    key: Line = ""
    """Private key file on this machine; empty: the agent's keys and the default ones."""
    python: Line = ""
    """Interpreter there, or the folder of an environment; empty: ``python3``."""
    project_path: Line = ""
    """Folder there to work in; empty: Muster's own cache folder."""
    data: Line = ""
    """Its own data with ``local_data``, there: a folder or a file; relative is below the home folder. Empty: what the
    profile says."""
    devices: tuple[_Device, ...] = ()
    """Devices that train, one worker each; empty: every GPU of several of one kind, else the machine's best one."""
    interface: _Interface = ""
    """Network interface for the training traffic there; empty: the one that has the address."""
    be_polite: bool = False
    """Whether its workers give way to its owner, as with the option of this name."""
    found_at: _Address = ""
    """Literal address where the machine with this host key was found; instead of what ``address`` leads to."""
    carries_coordinator: bool = False
    """Whether the coordinator of a run is here; where no machine says so, it is on the one that starts the run."""
    coordinator_at: _Address = ""
    """Literal address of the coordinator as this machine should dial it; empty: that on the route between the two."""

    @property
    def host(self) -> str:
        """The destination for SSH."""
        return self.address or self.name

    @property
    def login(self) -> str:
        """Host, user and port as typed after ``ssh``: ``[user@]host[:port]``."""
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        return f"{user}{host}{port}"

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of its SSH server, equal for entries that lead to one."""
        return self.host.casefold().rstrip("."), self.port or 22

    @property
    def is_local(self) -> bool:
        """Whether this is the machine Muster runs on, reached without SSH."""
        return self.host in HERE and self.port is None and not self.user

    @property
    def python_command(self) -> str:
        """Path of the interpreter there; empty where none was chosen."""
        if not self.python or re.match(r"python[\d.]*(\.exe)?$", self.python.rsplit("/", 1)[-1]):
            return self.python
        return f"{self.python.rstrip('/')}/bin/python"


class Hosts(BaseModel):
    """All machines of a run, the master first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machines: Annotated[tuple[Machine, ...], Field(min_length=1)]
    ssh_config: Line = ""
    """OpenSSH client configuration to use instead of ~/.ssh/config."""

    @property
    def master(self) -> Machine:
        """Rank 0."""
        return self.machines[0]

    def only(self, names: Collection[str]) -> Hosts:
        """Return the hosts with the machines of these names alone."""
        return self.model_copy(update={"machines": tuple(m for m in self.machines if m.name in names)})

    def machine(self, name: str) -> Machine:
        """Return the machine of this name.

        Raises:
            BadInput: there is none.
        """
        for machine in self.machines:
            if machine.name.casefold() == name.casefold():
                return machine
        raise BadInput(f"no machine '{name}' in the hosts file", nearest(name, [m.name for m in self.machines]))


def requested_machine(entry: Mapping[str, Any]) -> Machine:
    """Return the machine of a request to add it.

    Raises:
        BadInput: it is none.
    """
    try:
        return Machine.model_validate(entry)
    except ValidationError as error:
        raise BadInput("the request names no valid machine", "add it as [user@]host[:port]") from error
