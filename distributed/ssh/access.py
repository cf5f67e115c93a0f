"""Checks log-ins to machines: how far each came, why it failed, and what to do. Installs our key with a password.

docs/how-to/access.md has the stages of the way to a machine, and why Muster has its own key. A password is an argument
of one function call and goes to the SSH server inside the encrypted connection. It is in no file, message, command line
or environment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from distributed.ssh.config import OWN_KEY, ResolvedHost, SshTarget, demands_of, resolve
from distributed.ssh.connection import CONNECT_TIMEOUT, SshConnection, Trust
from distributed.ssh.errors import (
    NoKeyAccepted,
    PasswordOnly,
    RemoteFileError,
    SshError,
    Stage,
    UnknownHostKey,
)
from distributed.ssh.keys.host_keys import HostKeyInfo
from profiles.errors import BadInput, MusterError
from profiles.installation import command_line

Connect = Callable[..., contextlib.AbstractContextManager[SshConnection]]
"""Makes a connection, as :meth:`SshConnection.connect` does."""
_AT_ONCE = 32
INSTALL = r"""# adds a key to authorized_keys
umask 077
fail() { echo "$1" >&2; exit 1; }
IFS= read -r line || fail "no key arrived"
blob=${line#* }; blob=${blob%% *}
folder=$HOME/.ssh; file=$folder/authorized_keys
has() { [ -f "$file" ] && grep -v '^[[:space:]]*#' "$file" | grep -qF -- "$blob"; }
if has; then echo present; else
  mkdir -p "$folder" || fail "$folder cannot be made"
  torn=
  if [ -s "$file" ] && [ -n "$(tail -c 1 "$file")" ]; then torn='\n'; fi
  printf "$torn%s\n" "$line" >> "$file" || fail "$file cannot be written"
  has || fail "$file did not take the key"
  echo added
fi
chmod go-w "$folder" "$file"
if command -v restorecon >/dev/null 2>&1; then restorecon -RF "$folder" >/dev/null 2>&1; fi
case $(ls -ldL "$HOME") in ?????w*|????????w*) echo "open $HOME";; esac
exit 0"""
"""Adds the line on stdin to authorized_keys unless its key is present. New files are 700/600, a link is written
through, a last line without newline is completed. ``open``: others may write to the home folder, so sshd ignores its
keys.
"""

_install_lock = threading.Lock()
"""Prevents concurrent installations under two names of one machine from adding the key twice."""


@dataclass(frozen=True)
class AccessReport:
    """The outcome of one attempt to log in to a machine."""

    machine: str
    where: str = ""
    """``host:port`` as SSH resolved it."""
    user: str = ""
    failed: Stage | None = None
    """The stage that failed; ``None``: all stages passed."""
    cause: str = ""
    """Stable identifier for programs; see docs/how-to/access.md."""
    problem: str = ""
    fix: str = ""
    seconds: float = 0.0
    fingerprint: str = ""
    """Fingerprint of the host key; empty where it was not seen."""
    authenticated_by: str = ""
    """The key's label."""
    system: str = ""
    """Output of ``uname -sm``."""
    host_name: str = ""
    """Its own name, as it told it; it may be anything."""
    password_possible: bool = False
    """Whether :func:`install_key` could install our key with a password."""
    command: str = ""
    """Command that authorises this computer when run on the machine; set where it accepts none of our keys."""
    demands: tuple[str, ...] = ()
    """What the user must approve before the SSH configuration is used that a hosts file names, in sentences."""
    unknown_key: HostKeyInfo | None = field(default=None, repr=False)
    """Host key for the user to compare, at the first contact with this machine or a jump host before it."""

    @property
    def ok(self) -> bool:
        return self.failed is None

    @property
    def stages(self) -> dict[Stage, bool | None]:
        """For each stage whether it passed; ``None`` where it was not tried."""
        order = list(Stage)
        end = len(order) if self.failed is None else order.index(self.failed)
        return {stage: True if index < end else (None if index > end else False) for index, stage in enumerate(order)}


def check_access(
    target: SshTarget,
    *,
    trust: Trust | None = None,
    timeout: float = CONNECT_TIMEOUT,
    connect: Connect = SshConnection.connect,
) -> AccessReport:
    """Try every stage of a log-in to a machine once, within ``timeout`` seconds for each machine on the route.

    Args:
        trust: asked about an unknown machine; ``None`` refuses it. A changed key is refused without asking.
        connect: makes the connection; one from a pool stays open.
    """
    begin = time.monotonic()
    host: ResolvedHost | None = None
    try:
        host = resolve(target)
        with connect(target, trust=trust, timeout=timeout) as connection:
            return AccessReport(
                machine=target.name,
                where=host.host_port,
                user=host.user,
                seconds=time.monotonic() - begin,
                fingerprint=connection.fingerprint,
                authenticated_by=connection.authenticated_by,
                system=connection.system,
                host_name=connection.host_name,
            )
    except MusterError as error:
        return explain(target, host, error, time.monotonic() - begin)


def check_all(
    targets: Sequence[SshTarget], *, trust: Trust | None = None, timeout: float = CONNECT_TIMEOUT
) -> dict[str, AccessReport]:
    """Check machines concurrently; return their reports by name."""
    with ThreadPoolExecutor(min(len(targets), _AT_ONCE) or 1) as pool:
        reports = pool.map(lambda target: check_access(target, trust=trust, timeout=timeout), targets)
        return {report.machine: report for report in reports}


def explain(
    target: SshTarget,
    host: ResolvedHost | None,
    error: MusterError,
    seconds: float = 0.0,
    own_key: Callable[[], OwnKey] | None = None,
) -> AccessReport:
    """Return the report of a log-in that failed with ``error``.

    Args:
        own_key: returns the key that a command in the report authorises; default: :func:`own_key`, which creates it.
    """
    ssh = error if isinstance(error, SshError) else None
    through = ssh is not None and ssh.machine != target.name  # a jump host on the route
    return AccessReport(
        machine=target.name,
        where=host.host_port if host else target.host,
        user=host.user if host else target.user,
        failed=ssh.stage if ssh else Stage.REACH,
        cause=ssh.cause if ssh else "ssh_config",
        problem=error.message_for(target.name),
        fix=_fix(error, target, host, through, own_key),
        seconds=seconds,
        fingerprint=ssh.key.fingerprint if isinstance(ssh, UnknownHostKey) else "",
        command=_own_command(own_key) if isinstance(ssh, NoKeyAccepted) and not (through or ssh.mendable) else "",
        password_possible=isinstance(ssh, NoKeyAccepted) and ssh.password_possible and not through,
        demands=tuple(demands_of(target.config_file)) if target.from_hosts_file and host is None else (),
        unknown_key=ssh.key if isinstance(ssh, UnknownHostKey) else None,
    )


def _fix(
    error: MusterError,
    target: SshTarget,
    host: ResolvedHost | None,
    through: bool,
    own_key: Callable[[], OwnKey] | None,
) -> str:
    """Return the hint of the error, or a better one from the ``access`` command."""
    if isinstance(error, PasswordOnly):
        return "set PubkeyAuthentication yes in its /etc/ssh/sshd_config, restart its SSH server, and try again"
    if not isinstance(error, NoKeyAccepted) or host is None or through or error.mendable:
        return error.hint
    user_hint = f"is '{host.user}' the right user there (it is your name here)? " if host.user_is_guess else ""
    if error.password_possible:
        return f"{user_hint}on a terminal, run {_access_line(target)}: its password, entered once, installs a key"
    return (
        f"{user_hint}it accepts no password: run this on that machine itself, as '{host.user}': {_own_command(own_key)}"
    )


def _access_line(target: SshTarget) -> str:
    """Return the ``access`` command of a machine, with its destination as typed after ``ssh``."""
    host = f"[{target.host}]" if target.port and ":" in target.host else target.host
    user, port = f"{target.user}@" if target.user else "", f":{target.port}" if target.port else ""
    return command_line("machines", "access", f"{user}{host}{port}")


def _own_command(key: Callable[[], OwnKey] | None) -> str:
    """Return :func:`authorize_command`; where we have no key, how to authorise the user's own."""
    try:
        return authorize_command((key or own_key)())
    except BadInput as error:
        return f"add a public key of yours to ~/.ssh/authorized_keys ({error.message})"


def authorize_command(key: OwnKey) -> str:
    """Return the command that authorises this computer's key when run on another machine."""
    line = shlex.quote(key.line)
    return f"mkdir -p -m 700 ~/.ssh && echo {line} >> ~/.ssh/authorized_keys && chmod 600 ~/.ssh/authorized_keys"


# ----------------------------------------------------------------------------------------------------- our key


@dataclass(frozen=True)
class OwnKey:
    """Muster's key pair on this machine."""

    path: Path
    """The private key; readable by this user only."""
    line: str
    """The public key as in authorized_keys: type, base64, comment."""

    @property
    def blob(self) -> str:
        """The base64 of the public key, which identifies its line."""
        return self.line.split()[1]


@dataclass(frozen=True)
class Installed:
    """The outcome of installing our key on a machine."""

    report: AccessReport
    """Report of a log-in with our key alone."""
    added: bool
    """Whether the line was not present before."""
    key: OwnKey


def own_key_path() -> Path:
    return Path(OWN_KEY).expanduser()


def read_own_key() -> OwnKey | None:
    """Return our key, or ``None`` where none was created yet.

    Raises:
        BadInput: the file is not a usable key.
    """
    path = own_key_path()
    if not path.exists():
        return None
    try:
        key = paramiko.PKey.from_path(path)
    except (paramiko.SSHException, UnsupportedAlgorithm, OSError, ValueError, TypeError) as error:
        hint = "move it away: a new one is made, and you enter the passwords again"
        raise BadInput(f"{path}: not a key that can be used without a passphrase ({error})", hint) from None
    return OwnKey(path, f"{key.get_name()} {key.get_base64()} {_comment()}")


def own_key() -> OwnKey:
    """Return our key; created by the first call.

    Raises:
        BadInput: it cannot be written, or the file is not a usable key.
    """
    path = own_key_path()
    try:
        if not path.exists():
            _create_key(path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}", "make ~/.ssh writable for you") from None
    key = read_own_key()
    assert key is not None
    return key


def _create_key(path: Path) -> None:
    """Write a new key pair; the private file appears atomically, and is never readable by others."""
    private = Ed25519PrivateKey.generate()
    private_bytes = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(private_bytes)
        os.link(temporary, path)
    except FileExistsError:  # another process was faster
        return
    finally:
        temporary.unlink()
    path.with_name(f"{path.name}.pub").write_text(f"{public.decode()} {_comment()}\n")


def _comment() -> str:
    """Return the comment that shows the key's owner in authorized_keys."""
    hostname = "".join(letter for letter in socket.gethostname() if letter.isalnum() or letter in "-._")
    return f"muster@{hostname or 'unnamed'}"


def install_key(
    target: SshTarget,
    password: str,
    *,
    trust: Trust | None = None,
    timeout: float = CONNECT_TIMEOUT,
    connect: Connect = SshConnection.connect,
) -> Installed:
    """Log in with the password, add our key to authorized_keys there, and log in with our key alone.

    Args:
        connect: makes the connection with our key; one from a pool stays open.

    Raises:
        SshError: PasswordRefused, or any other failure to connect; RemoteFileError where the key cannot be written.
        BadInput: our key cannot be created or read.
    """
    key = own_key()
    with SshConnection.connect(target, trust=trust, password=password, timeout=timeout) as connection, _install_lock:
        done = connection.run(["sh", "-c", INSTALL], input=f"{key.line}\n".encode(), timeout=timeout)
    if not done.ok:
        problem = f"Muster's key cannot be added to ~/.ssh/authorized_keys: {done.problem}"
        raise RemoteFileError(target.name, problem, "check the permissions and the free space of the home folder there")
    output = done.stdout.decode(errors="replace").splitlines()
    report = check_access(replace(target, key=str(key.path)), trust=trust, timeout=timeout, connect=connect)
    if not report.ok:
        report = replace(report, problem=f"Muster's key is in ~/.ssh/authorized_keys there, but: {report.problem}",
                         fix=_key_ignored_hint(output, report), password_possible=False)  # fmt: skip
    return Installed(report, "added" in output, key)


def _key_ignored_hint(output: list[str], report: AccessReport) -> str:
    home = next((line.removeprefix("open ") for line in output if line.startswith("open ")), "")
    if report.cause != "no_key_accepted":
        return report.fix
    if home:
        return f"others may write to {home}, so its SSH server ignores the keys there: chmod go-w {home}"
    return "does its sshd_config read another AuthorizedKeysFile? sudo sshd -T | grep -i authorizedkeysfile shows it"
