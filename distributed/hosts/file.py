"""The hosts file: which machines take part and how each is reached.

There are two forms. The plain one is written by hand::

    {"master": "studio.local", "workers": ["mac-mini.local", "ada@gpu-box:2222"], "ssh_user": "ada"}

The long one has an object for each machine (:class:`~distributed.hosts.schema.Machine`) and is what
:func:`save_hosts` writes. Both may be mixed: an entry is a text or an object, and the settings beside the entries are
defaults for all of them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from distributed.hosts.approvals import approve, digest_of, is_approved
from distributed.hosts.foreign_formats import refuse_foreign
from distributed.hosts.past_logins import at_last_login, past_logins
from distributed.hosts.schema import HERE, Line, nearest, short
from distributed.hosts.schema import Hosts as Hosts
from distributed.hosts.schema import Machine as Machine
from profiles.declarations import nearest as closest
from profiles.errors import BadInput
from profiles.installation import IS_CHECKOUT, SHARED, USUAL_HOSTS, training_python
from training.records.run_files import explain_errors, write_atomically

RUN_HOSTS = "hosts.json"
"""File in the run folder with the machines of the run."""
_EXPECTED = {
    "name": "a name without slashes and control characters, at most 64 characters",
    "address": "a host name, an alias of ~/.ssh/config, or an IP address",
    "port": "a number from 1 to 65535",
    "user": "a user name",
    "devices": 'a list of "auto", "cpu", "mps", "cuda" or "cuda:0"',
    "interface": "the name of one network interface, for example en0",
}
_PLAIN_DEFAULTS = {"ssh_user": "user", "ssh_key_path": "key", "python_env": "python", "project_path": "project_path"}
_EXAMPLE = 'for example {"master": "a.local", "workers": ["b.local"]}'
_TOP_KEYS = ("master", "workers", "machines", "ssh_config", *_PLAIN_DEFAULTS)
_LINE = TypeAdapter(Line)
_SUFFIXES = (".json", ".txt", ".yaml", ".yml", ".toml", ".ini", ".cfg")
"""Suffixes of hosts files: a missing file with one of these is not taken for a machine."""


_EXAMPLE_FILE = "distributed_hosts.json.example" if IS_CHECKOUT else str(SHARED / "distributed_hosts.json.example")


def load_hosts(path: Path) -> Hosts:
    """Read a hosts file of either form, or machines as typed after ``ssh``, separated by commas.

    Raises:
        BadInput: it cannot be read or used; the message names the file and the location.
    """
    if names_machines(path):
        return typed_hosts(str(path))
    try:
        data = path.expanduser().read_bytes()
        text = data.decode(
            "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        )  # as written by PowerShell
    except FileNotFoundError:
        hint = f"name machines as after ssh, with commas between them, or copy {_EXAMPLE_FILE} and fill it in"
        raise BadInput(f"{path}: no such hosts file", hint) from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}", "name a hosts file with --hosts FILE") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not a text file (byte {error.start})", "save it as UTF-8") from None
    return parse_hosts(text, str(path))


def names_machines(path: Path) -> bool:
    """Whether a path is a list of machines: no such file exists, and it does not look like a file name."""
    text = str(path)
    return os.sep not in text and ("," in text or path.suffix.lower() not in _SUFFIXES) and not path.exists()


def typed_hosts(text: str) -> Hosts:
    """Return the machines of ``[user@]host[:port],...``, the first one as the master.

    A name alone that the usual hosts file lists is that machine, with all that the file says of it. Another name that
    leads nowhere is that of a machine that let Muster in before.

    Raises:
        BadInput: an entry is not a machine, is listed twice, or has the name of several past log-ins.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    entries = [split_address(word) for word in words]
    shared = {name for name, count in Counter(entry["name"].casefold() for entry in entries).items() if count > 1}
    for word, entry in zip(words, entries):
        entry["address"] = entry["name"]
        if entry["name"].casefold() in shared:
            entry["name"] = word
    return hosts_as_listed(parse_hosts(json.dumps({"machines": entries}), "--hosts"))


def hosts_as_listed(typed: Hosts) -> Hosts:
    """Return typed machines, each as the usual hosts file has it, else where one of its name let Muster in.

    Raises:
        BadInput: a name is that of several machines, or two are the same machine.
    """
    names = {machine.name.casefold() for machine in typed.machines if not machine.user and machine.port is None}
    usual = load_hosts(USUAL_HOSTS) if names and USUAL_HOSTS.is_file() else None
    of_file = usual.machines if usual is not None else ()
    listed = {machine.name.casefold(): machine for machine in of_file if machine.name.casefold() in names}
    machines = tuple(listed.get(machine.name.casefold()) or _by_name(machine) for machine in typed.machines)
    _refuse_duplicates(machines, "--hosts")
    return Hosts(machines=machines, ssh_config=usual.ssh_config if usual is not None and listed else "")


def as_listed(machine: Machine) -> Machine:
    """Return a typed machine as ``--hosts`` finds it: in the usual hosts file, or where one of its name let Muster in.

    Raises:
        BadInput: its name is that of several machines.
    """
    return hosts_as_listed(Hosts(machines=(machine,))).machines[0]


def nearest_machine(name: str) -> str | None:
    """Return the name, or address, of the machine of the usual hosts file or the past log-ins that ``name`` is probably
    a misspelling of; ``None`` if none is close, or it is no misspelling."""
    names = [text for login in past_logins() for text in (login.name, login.host)]
    with contextlib.suppress(BadInput):
        names += [text for machine in load_hosts(USUAL_HOSTS).machines for text in (machine.name, machine.host)]
    is_exact = name.casefold() in (known.casefold() for known in names)
    return None if is_exact else closest(name, [known for known in names if not is_literal_address(known)])


def _by_name(machine: Machine) -> Machine:
    """Return a typed machine; if it is typed by name, as :func:`at_last_login` finds it."""
    is_address = machine.port is not None or machine.host in HERE or is_literal_address(machine.host)
    return machine if is_address else at_last_login(machine)


def parse_hosts(text: str, source: str = "hosts file") -> Hosts:
    """Parse the text of a hosts file; ``source`` is its name in messages.

    Raises:
        BadInput: as :func:`load_hosts`.
    """
    refuse_foreign(text, source)
    top = _parse_json(text, source)
    if not isinstance(top, dict):
        raise BadInput(f"{source}: expected an object in braces", _EXAMPLE)
    _refuse_unknown(top, _TOP_KEYS, source)
    defaults = {new: _line(top[old], old, source) for old, new in _PLAIN_DEFAULTS.items() if top.get(old) is not None}
    machines = [_machine(entry, n, defaults, source) for n, entry in enumerate(_entries(top, source), start=1)]
    _refuse_duplicates(machines, source)
    ssh_config = _line(top.get("ssh_config") or "", "ssh_config", source)
    return Hosts(machines=_master_first(machines, top, source), ssh_config=ssh_config)


def dump_hosts(hosts: Hosts) -> str:
    """Return the long form, without empty fields."""
    machines = [machine.model_dump(mode="json", exclude_defaults=True) for machine in hosts.machines]
    document: dict[str, Any] = {"master": hosts.master.name, "machines": machines}
    if hosts.ssh_config:
        document["ssh_config"] = hosts.ssh_config
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def save_hosts(hosts: Hosts, path: Path) -> None:
    """Write the long form atomically.

    Raises:
        BadInput: it cannot be written; the old file is untouched.
    """
    target = path.expanduser()
    with explain_errors(target):
        write_atomically(target, dump_hosts(hosts).encode(), mode=0o600)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise BadInput(f"the key '{short(key)}' appears twice in one object", "keep one of them")
        result[key] = value
    return result


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        _explain_syntax(text, error, source)
    except BadInput as error:
        raise BadInput(f"{source}: {error.message}", error.hint) from None
    except (RecursionError, ValueError):
        raise BadInput(f"{source}: not a hosts file (nested too deep, or a huge number)", _EXAMPLE) from None


def _explain_syntax(text: str, error: json.JSONDecodeError, source: str) -> NoReturn:
    """Report the position to change: a missing comma belongs to the end of the previous entry."""
    position, problem = error.pos, error.msg[0].lower() + error.msg[1:]
    hint = f"copy {_EXAMPLE_FILE} and fill it in"
    if error.msg.startswith("Expecting ',' delimiter"):
        position = len(text[: error.pos].rstrip())
        problem, hint = "a comma or a closing bracket is missing here", "end the entry before with a comma"
    elif not text.strip():
        problem = "the file is empty"
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    shown = "".join(c if c.isprintable() else " " for c in text.split("\n")[line - 1])
    raise BadInput(f"{source}:{line}:{column}: {problem}: {short(shown.strip())}", hint)


def _refuse_unknown(entry: Mapping[str, Any], allowed: Iterable[str], location: str) -> None:
    names = list(allowed)
    for key in entry:
        if key not in names:
            raise BadInput(f"{location}: unknown key '{short(key)}'", nearest(key, names))


def _line(value: Any, key: str, source: str) -> str:
    try:
        return _LINE.validate_python(value)
    except ValidationError:
        raise BadInput(f"{source}: '{key}' must be one line of text", 'for example "~/.ssh/id_ed25519"') from None


def _entries(top: dict[str, Any], source: str) -> list[Any]:
    """Return the entries of all machines; the plain form's master comes first."""
    if "machines" in top and "workers" in top:
        raise BadInput(f"{source}: has both 'machines' and 'workers'", "list every machine in one of them")
    key = "machines" if "machines" in top else "workers"
    listed = top.get(key) or []
    if not isinstance(listed, list):
        raise BadInput(f"{source}: '{key}' must be a list in brackets", f'for example "{key}": ["b.local"]')
    entries = list(listed)
    if key == "workers" and top.get("master"):
        entries.insert(0, top["master"])
    if not entries:
        raise BadInput(f"{source}: names no machine", _EXAMPLE)
    return entries


def _machine(entry: Any, number: int, defaults: dict[str, str], source: str) -> Machine:
    location = f"{source}: machine {number}"
    if isinstance(entry, str):
        entry = split_address(entry)
    if not isinstance(entry, dict):
        example = 'for example "b.local" or {"name": "b", "address": "10.0.0.2"}'
        raise BadInput(f"{location}: expected a name or an object", example)
    label = entry.get("name") or entry.get("address")
    location += f" ({short(label)!r})" if isinstance(label, str) else ""
    _refuse_unknown(entry, Machine.model_fields, location)
    fields = {**defaults, "name": label, **{key: value for key, value in entry.items() if value is not None}}
    try:
        machine = Machine.model_validate(fields)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        problem = f"'{field}' must be {_EXPECTED.get(field, 'one line of text')}, not {short(repr(fields.get(field)))}"
        raise BadInput(f"{location}: {problem}", f"{_EXAMPLE_FILE} has entries to copy") from None
    if twice := _listed_twice(machine.devices):
        raise BadInput(f"{location}: 'devices' names {twice} twice, and it trains one worker", "remove one of them")
    return machine


def _listed_twice(devices: Sequence[str]) -> str:
    """Return a device that a machine has once and that is listed twice; empty: none. Its cores can be shared."""
    single = ["cuda:0" if device == "cuda" else device for device in devices if device != "cpu"]
    return next((device for device in single if single.count(device) > 1), "")


def split_address(text: str) -> dict[str, Any]:
    """Split ``[user@]host[:port]``; an IPv6 address with a port is in brackets. The name is the host."""
    user, _, host_and_port = text.strip().rpartition("@")
    match = re.fullmatch(r"\[([^\]]*)\](?::(\d{1,6}))?|([^:]*):(\d{1,6})", host_and_port)
    host = (match[1] or match[3] or "") if match else host_and_port
    port = (match[2] or match[4]) if match else None
    return {"name": host, "user": user or None, "port": int(port) if port else None}


def is_literal_address(host: str) -> bool:
    """Whether a host is an IP address, with or without a scope, rather than a name."""
    try:
        return bool(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return False


def typed_machine(text: str) -> Machine:
    """Return the machine typed as ``[user@]host[:port]``.

    Raises:
        BadInput: the text is not an address.
    """
    address = split_address(text)
    try:
        return Machine(
            name=address["name"][:64], address=address["name"], port=address["port"], user=address["user"] or ""
        )
    except ValidationError as error:
        hint = "write it as after ssh, for example ada@studio.local"
        raise BadInput(f"'{text.strip()[:40]}' is not a machine", hint) from error


def machine_to_add(text: str) -> Machine:
    """Return the machine typed to join a run: this computer, by its own name, is reached without an SSH server.

    Raises:
        BadInput: the text is not an address.
    """
    machine = typed_machine(text)
    is_here = machine.login.casefold().removesuffix(".local") == socket.gethostname().casefold().removesuffix(".local")
    return machine.model_copy(update={"address": HERE[0]}) if is_here else machine


def _refuse_duplicates(machines: Sequence[Machine], source: str) -> None:
    names: dict[str, int] = {}
    endpoints: dict[tuple[str, int], int] = {}
    for number, machine in enumerate(machines, start=1):
        twin = names.setdefault(machine.name.casefold(), number)
        if twin != number:
            problem = f"machines {twin} and {number} share a name, '{machine.name}'"
            raise BadInput(f"{source}: {problem}", "rename one, or remove it")
        twin = endpoints.setdefault(machine.endpoint, number)
        if twin != number:
            names_of_both = f"'{machines[twin - 1].name}' and '{machine.name}'"
            raise BadInput(
                f"{source}: {names_of_both} are the same machine ({machine.endpoint[0]} port {machine.endpoint[1]})",
                "remove one of them",
            )


def _master_first(machines: Sequence[Machine], top: dict[str, Any], source: str) -> tuple[Machine, ...]:
    master = top.get("master")
    if "machines" not in top or master is None:
        return tuple(machines)
    chosen = [m for m in machines if isinstance(master, str) and m.name.casefold() == master.casefold()]
    if not chosen:
        hint = nearest(str(master), [machine.name for machine in machines])
        raise BadInput(f"{source}: the master '{short(str(master))}' is not among the machines", hint)
    return (chosen[0], *(machine for machine in machines if machine is not chosen[0]))


# A hosts file from another person may name one of their programs as the interpreter of this computer. Muster's own
# interpreters and bare names are trusted; the content of any other interpreter must be approved by the user.


def other_python(machine: Machine) -> Path | None:
    """Return the interpreter of this computer that a machine's entry names, if it is none of Muster's own."""
    if not machine.is_local or "/" not in machine.python_command:
        return None
    program = Path(os.path.abspath(os.path.expanduser(machine.python_command)))
    return None if str(program) in (sys.executable, training_python()) else program


def python_demands(hosts: Hosts) -> list[str]:
    """Return what a user approves with the interpreters that a hosts file names, in sentences."""
    return [f"it names the interpreter {program} of this computer" for program in unapproved_pythons(hosts)]


def unapproved_pythons(hosts: Hosts) -> list[Path]:
    """Return the interpreters for this computer that the user has not approved."""
    return [program for machine in hosts.machines if (program := _unapproved_python(machine))]


def accept_pythons(hosts: Hosts) -> None:
    """Approve the interpreters: the user has named the hosts file, or approved them."""
    for program in unapproved_pythons(hosts):
        approve(digest_of("python", [program]), f"interpreter {program}")


def without_unapproved_pythons(hosts: Hosts) -> Hosts:
    """Return the hosts with the default interpreter here instead of an unapproved one."""
    machines = (m.model_copy(update={"python": ""}) if _unapproved_python(m) else m for m in hosts.machines)
    return hosts.model_copy(update={"machines": tuple(machines)})


def _unapproved_python(machine: Machine) -> Path | None:
    program = other_python(machine)
    return None if program is None or is_approved(digest_of("python", [program])) else program
