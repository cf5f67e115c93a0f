"""Log-in with the agent's keys, key files, or a password, and the explanation where it fails."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH

from distributed.ssh.config import ResolvedHost
from distributed.ssh.errors import (
    Dropped,
    NoKeyAccepted,
    PasswordOnly,
    PasswordRefused,
    SshError,
    Stage,
    UserRefused,
    one_line,
)
from distributed.ssh.keys.host_keys import fingerprint
from distributed.ssh.keys.key_files import certificate_of, explain_key, is_default, public_blob
from distributed.ssh.wire import stalled
from profiles.errors import counted
from profiles.installation import program

_SHOWN = 6
_NOTICE = 300
"""Maximum characters of a server's notice that are shown."""
_AGENT_TIMEOUT = 30.0
"""Timeout of the agent in seconds: it may ask the user for a touch or a password."""


@dataclass(frozen=True)
class _Candidate:
    """A key to try, or the reason why it cannot be tried."""

    label: str
    key: Any = None
    problem: str = ""
    fix: str = ""
    """How to fix it, if possible."""
    timeout: float = 0.0
    """Additional seconds for the key's holder to sign."""
    certificate: Any = None
    """Certificate to present in place of the public key."""

    def certified(self, certificate: Any) -> _Candidate:
        return replace(self, label=f"{self.label} with a certificate", certificate=certificate)


@contextlib.contextmanager
def _agent_keys(path: str) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of the user's running ssh-agent, which can sign within the context; empty without an agent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(_AGENT_TIMEOUT)
        agent = AgentSSH()
        try:
            if path:
                stream.connect(path)
                agent._connect(stream)
        except (OSError, paramiko.SSHException):
            pass  # the agent has ended
        yield agent.get_keys()


class Prompts:
    """Answers the prompts of ``keyboard-interactive`` (RFC 4256): the first hidden one is taken for the password."""

    def __init__(self, password: str) -> None:
        self._password: str | None = password
        self._asked = ""
        self.further_prompt = ""
        """A prompt that a password does not answer, such as for a one-time code."""

    def answer(self, title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
        """Return one answer for each prompt, given as its text and whether input is echoed."""
        return [self._answer_prompt(text, shown) for text, shown in prompts]

    def _answer_prompt(self, text: str, shown: bool) -> str:
        if shown or self._password is None:
            if shown or text != self._asked:  # the same prompt again: the password was wrong
                self.further_prompt = self.further_prompt or text.strip()[:60] or "a further answer"
            return ""
        password, self._password, self._asked = self._password, None, text
        return password


class Login:
    """One log-in on an open transport.

    Args:
        transport: a paramiko transport after the key exchange.
        disconnect: list to which the transport's owner appends the server's disconnect message.
        timeout: seconds the server may take for each reply.
    """

    def __init__(self, host: ResolvedHost, transport: Any, disconnect: list[str], timeout: float) -> None:
        self._host = host
        self._timeout = timeout
        self._transport = transport
        self._disconnect = disconnect
        self._tried: list[str] = []
        self._locked: list[Path] = []
        self._fix = ""
        """How to fix the key that could not be tried: the one of the hosts file, or any if there was no other."""
        self._password_possible = False

    def run(self, password: str | None) -> str:
        """Log in and return how: the key's label, ``password`` or ``none``.

        Raises:
            SshError: UserRefused, NoKeyAccepted, PasswordOnly, PasswordRefused or Dropped.
        """
        methods = self._methods()
        if not methods:
            return "none"
        keys_possible = "publickey" in methods
        self._password_possible = bool({"password", "keyboard-interactive"} & methods)
        if password is not None and self._password_possible:
            return self._try_password(password, "password" in methods)  # no keys: servers allow few attempts
        label = self._try_keys() if keys_possible else ""
        if label:
            return label
        raise self._refusal(keys_possible)

    def _methods(self) -> set[str]:
        """Return the methods that the server offers this user; empty if none is needed."""
        self._transport.auth_timeout = self._timeout
        try:
            return set(self._transport.auth_none(self._host.user))
        except paramiko.BadAuthenticationType as error:
            return set(error.allowed_types)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._lost(error) from None

    def _try_keys(self) -> str:
        with _agent_keys(self._host.agent_socket) as held:
            for candidate in self._candidates(held):
                if candidate.key is None:
                    if candidate.label == str(self._host.named_key) or not self._tried:
                        self._fix = candidate.fix
                    self._tried.append(f"{candidate.label} ({candidate.problem})")
                elif self._try_key(candidate):
                    return candidate.label
        return ""

    def _try_key(self, candidate: _Candidate) -> bool:
        self._tried.append(candidate.label)
        if not self._host.named_key:
            self._fix = ""
        self._transport.auth_timeout = self._timeout + candidate.timeout
        candidate.key.public_blob = candidate.certificate
        try:
            missing = self._transport.auth_publickey(self._host.user, candidate.key)
        except paramiko.BadAuthenticationType:
            return False
        except (paramiko.SSHException, OSError, EOFError) as error:
            if not self._transport.is_active() or _timed_out(error):
                raise self._lost(error) from None
            return False  # refused, or the agent would not sign
        self._require_complete(missing, "allow login by key alone for this user")
        return True

    def _require_complete(self, missing: list[str], hint: str) -> None:
        if missing:
            problem = f"user '{self._host.user}' needs a second proof at {self._host.host_port} ({', '.join(missing)})"
            raise UserRefused(self._host.machine, problem, hint)

    def _candidates(self, held: tuple[Any, ...]) -> Iterator[_Candidate]:
        """Yield keys in OpenSSH's order, after the one that the hosts file names: the agent's configured keys, its
        other keys, then files."""
        blobs = {path: public_blob(path) for path in self._host.key_files}
        configured = [key for key in held if key.asbytes() in blobs.values()]
        others = [] if self._host.identities_only else [key for key in held if key.asbytes() not in blobs.values()]
        in_agent = {key.asbytes() for key in held}
        files = [
            path for path, blob in blobs.items() if blob not in in_agent and (path.exists() or not is_default(path))
        ]
        named = [path for path in files if path == self._host.named_key]
        early = named or [path for path in files[:1] if path == next(filter(Path.exists, blobs), None)]
        yield from self._of_files(named)
        yield from self._of_agent(configured)
        yield from self._of_files([path for path in early if path not in named])
        yield from self._of_agent(others)
        yield from self._of_files([path for path in files if path not in early])

    def _of_agent(self, keys: Sequence[Any]) -> Iterator[_Candidate]:
        """Yield each key with its certificates first, as OpenSSH does."""
        for key in keys:
            name = getattr(key, "comment", "") or fingerprint(key.asbytes())
            plain = _Candidate(f"agent key {name}", key, timeout=_AGENT_TIMEOUT)
            yield from (plain.certified(certificate) for certificate in self._certificates(key))
            yield plain

    def _of_files(self, paths: Sequence[Path]) -> Iterator[_Candidate]:
        for path in paths:
            plain = self._file_candidate(path)
            if plain.key is not None:
                certificates = self._certificates(plain.key, Path(f"{path}-cert.pub"))
                yield from (plain.certified(certificate) for certificate in certificates)
            yield plain

    def _certificates(self, key: Any, *extra_paths: Path) -> Iterator[Any]:
        """Yield the certificates of a key from the configured files, and from those beside its own."""
        siblings = [Path(f"{path}-cert.pub") for path in self._host.key_files if public_blob(path) == key.asbytes()]
        for path in dict.fromkeys([*self._host.certificate_files, *extra_paths, *siblings]):
            if certificate := certificate_of(path, key.asbytes()):
                yield certificate

    def _file_candidate(self, path: Path) -> _Candidate:
        try:
            return _Candidate(str(path), paramiko.PKey.from_path(path))
        except (paramiko.PasswordRequiredException, TypeError):
            self._locked.append(path)
            return _Candidate(str(path), problem="locked by a passphrase")
        except UnsupportedAlgorithm:
            return _Candidate(
                str(path), problem="on a security key, or of a kind that only the agent knows: ssh-add it"
            )
        except (paramiko.SSHException, OSError, ValueError) as error:
            return _Candidate(str(path), None, *explain_key(path, error))

    def _try_password(self, password: str, directly: bool) -> str:
        prompts = Prompts(password)
        try:
            if directly:
                missing = self._transport.auth_password(self._host.user, password, fallback=False)
            else:
                missing = self._transport.auth_interactive(self._host.user, prompts.answer)
        except (paramiko.SSHException, OSError, EOFError) as error:
            refused = isinstance(error, paramiko.AuthenticationException) and self._transport.is_active()
            if not refused or _timed_out(error):
                raise self._lost(error) from None
            if prompts.further_prompt:
                problem = f"{self._host.host_port} asks for more than a password ({prompts.further_prompt!r})"
                hint = "install a key there yourself, and allow login by key alone"
                raise UserRefused(self._host.machine, problem, hint) from None
            problem = f"the password for user '{self._host.user}' was refused at {self._host.host_port}"
            raise PasswordRefused(self._host.machine, problem, self._user_hint()) from None
        self._require_complete(missing, "install a key there and allow login by key alone")
        return "password"

    def _refusal(self, keys_possible: bool) -> SshError:
        host = self._host
        if not keys_possible:
            problem = f"{host.host_port} accepts no keys for user '{host.user}', only a password"
            hint = "enter the password once, or set PubkeyAuthentication yes in its sshd_config"
            return PasswordOnly(host.machine, problem, hint)
        remainder = f" and {len(self._tried) - _SHOWN} more" if len(self._tried) > _SHOWN else ""
        tried = f"tried: {', '.join(self._tried[:_SHOWN])}{remainder}" if self._tried else "there was none to try"
        problem = f"no key was accepted for user '{host.user}' at {host.host_port} ({tried})"
        mendable = bool(self._locked or self._fix)
        return NoKeyAccepted(host.machine, problem, self._key_hint(), self._password_possible, mendable)

    def _key_hint(self) -> str:
        host = self._host
        if self._locked:
            return f"unlock the key first: ssh-add {self._locked[0]}"
        if self._fix:
            return self._fix
        if self._password_possible:
            address = f"[{host.hostname}]" if ":" in host.hostname else host.hostname
            port = "" if host.port == 22 else f":{host.port}"
            access = program("machines", "access", f"{host.user}@{address}{port}")
            doubt = f"; is {host.user} the right user there?" if host.user_is_guess else ""
            return f"{access} installs a key with its password{doubt}"
        install = f"ssh-copy-id -p {host.port} {host.user}@{host.hostname}"
        if not self._tried:
            return f"make a key with ssh-keygen -t ed25519, then: {install}"
        ignored = "one that is there is ignored where others may write to the home folder, ~/.ssh or the file"
        return f"{self._user_hint()} To install your key there: {install}; {ignored} (chmod go-w)"

    def _user_hint(self) -> str:
        if self._host.user_is_guess:
            return f"'{self._host.user}' is your name on this machine; if it is another one there, set 'user'."
        return f"does the user '{self._host.user}' exist there, and may that user log in by SSH?"

    def _notice(self) -> str:
        """Return the server's notice before the log-in, such as an address to confirm it at, or why it refuses."""
        shown = getattr(self._transport.auth_handler, "banner", None) or b""
        return one_line((shown if isinstance(shown, bytes) else shown.encode()).decode(errors="replace"))[:_NOTICE]

    def _lost(self, error: Exception) -> SshError:
        """Return the error for a log-in that ended without a reply."""
        host, words = self._host, " ".join(self._disconnect)
        failure: SshError
        if _timed_out(error):
            failure = stalled(host, "did not answer during login", self._timeout, self._notice())
        elif "too many authentication failures" in words.lower():
            tried = ", ".join(self._tried[:_SHOWN])
            problem = f"{host.host_port} gave up after {counted(len(self._tried), 'key')} ({tried})"
            hint = "name the right one as 'key' in the hosts file"
            failure = NoKeyAccepted(host.machine, problem, hint, self._password_possible)
        else:
            detail = f" ({words or self._notice()})" if words or self._notice() else ""
            hint = "check its SSH server's log, and AllowUsers in its sshd_config"
            if "account has expired" in detail:
                hint = f"let somebody with rights there run: sudo chage -E -1 {host.user}"
            failure = Dropped(host.machine, f"{host.host_port} closed the connection during login{detail}", hint)
        failure.stage = Stage.LOGIN
        return failure


def _timed_out(error: Exception) -> bool:
    """Whether an error is a timeout, for which paramiko has no type of its own."""
    return isinstance(error, TimeoutError) or "timeout" in str(error).lower()
