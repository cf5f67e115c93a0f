"""Says in one line why pip or uv failed: the package that was asked for, the tool's own reason, and what to do.

Standard library only, Python >= 3.9: part of :mod:`distributed.agent.program`. pip's last line is often not its reason:
after a refused certificate it says "No matching distribution", and where an index lacks the tested version of a
package it says "ResolutionImpossible" (pip's issues 13164 and 8492).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_MOST_TEXT = 200
_HOST = re.compile(r"host='([^']+)'|https?://(?:[^/\s@]*@)?([^/:\s]+)")
_PACKAGE = re.compile(
    r"(?:satisfies the requirement|No matching distribution found for|Hash mismatch for|no version of|Cannot install) "
    r"`?([\w.\[\]-]+(?: ?[=<>!~]+ ?[^\s`(,]+)?)|^([\w.-]+==\S+) from |Because ([\w.-]+(?:==\S+)?) (?:was not|has no)",
    re.MULTILINE,
)
_CERTIFICATE = re.compile(r"certificate verify failed: ([^(]+)|invalid peer certificate: (\w+)")
_PROXY = re.compile(r"Tunnel connection failed: ([^'\"]+)|(?:ProxyError|tunnel error)\W+(.+)")
_HTTP_STATUS = re.compile(
    r"(?:HTTP error |returned an? )([45]\d\d(?: [A-Z]\w+)*)|([45]\d\d (?:Client|Server) Error: [\w ]+?) for url"
)
_UNREACHED_BECAUSE = re.compile(
    r"Name or service not known|nodename nor servname provided|Temporary failure in name resolution|"
    r"Network is unreachable|No route to host|Connection refused|Connection reset by peer|timed out"
)
_UNREACHED = re.compile(
    r"NewConnectionError|ConnectTimeout|Failed to (?:establish|resolve)|name resolution|dns error|Could not fetch URL|"
    r"tcp connect error|error sending request|connection broken by"
)
_CONFLICT = re.compile(r"conflict is caused by:\n((?:[^\n]+\n?)+)")
_CONFLICT_OF_UV = re.compile(r"[Bb]ecause (.+?),? we can conclude", re.DOTALL)
_CONSTRAINT = re.compile(r"The user requested \(constraint\) (\S+==\S+)")
_OTHER_PYTHON = re.compile(
    r"requires a different Python|requested Python version|only supports [<>]|no wheels with a matching Python"
)


class InstallFailure(NamedTuple):
    """Why packages were not installed."""

    problem: str
    """The package and the reason, in one line."""
    fix: str
    """To do on the machine that installs; empty where only another source of packages helps."""
    is_index_at_fault: bool = False
    """Whether packages sent by another machine would help."""


def explain(lines: Sequence[str]) -> InstallFailure:
    """Return the cause of a failure from the output of pip or uv, stripped line by line."""
    text = "\n".join(lines)
    package = next((next(filter(None, match.groups())) for match in _PACKAGE.finditer(text)), "")
    return (
        _of_the_machine(text, lines)
        or _of_a_file(text, package)
        or _of_the_connection(text, package)
        or _of_versions(text, package)
        or InstallFailure(f"the installer stopped with: {_message(lines)}", "try the last command by hand")
    )


def _of_the_machine(text: str, lines: Sequence[str]) -> InstallFailure | None:
    if "No space left" in text or "Disk quota" in text:
        problem = "the disk quota is used up" if "Disk quota" in text else "the disk is full"
        return InstallFailure(problem, "free some space (or inodes: df -i), or set 'project_path' to another disk")
    if match := re.search(r"No module named '?(pip|venv|ensurepip)\b|ensurepip is not available", text):
        problem = f"the module {match[1] or 'ensurepip'} is missing in its Python"
        return InstallFailure(problem, "on Debian and Ubuntu: sudo apt install python3-venv python3-pip; or install uv")
    if "Permission denied" in text:
        return InstallFailure(_message(lines), "who owns that folder? Set 'project_path' to one of yours")
    return None


def _of_a_file(text: str, package: str) -> InstallFailure | None:
    if "DO NOT MATCH THE HASHES" in text or "Hash mismatch" in text:
        problem = f"{package or 'a package'} differs from the file that was tested (its hash is another)"
        return InstallFailure(problem, "does a proxy or a mirror change downloads? pip config list shows it", True)
    return None


def _of_the_connection(text: str, package: str) -> InstallFailure | None:
    """The index was not reached, or answered with an error; packages that it did not name are not missing in it."""
    index = _index(text)
    asked = f" (asked for {package})" if package else ""
    if match := _CERTIFICATE.search(text):
        reason = (match[1] or match[2]).strip()
        fix = "is the clock right? Behind a proxy, set PIP_CERT to its certificate (for uv: SSL_CERT_FILE)"
        return InstallFailure(f"the certificate of {index} is not accepted: {reason}{asked}", fix, True)
    if match := _PROXY.search(text):
        reason = next(filter(None, match.groups())).strip("'() ,")[:_MOST_TEXT]
        return InstallFailure(f"the proxy does not pass on to {index}: {reason}{asked}", "check HTTPS_PROXY", True)
    if match := _UNREACHED_BECAUSE.search(text) or _UNREACHED.search(text):
        return InstallFailure(f"the package index cannot be reached: {index}: {match[0]}{asked}", "", True)
    if match := _HTTP_STATUS.search(text):
        problem = f"the package index {index} answers {match[1] or match[2]}{asked}"
        return InstallFailure(problem, "are its address and its password right? pip config list shows them", True)
    return None


def _of_versions(text: str, package: str) -> InstallFailure | None:
    python = _python_for(text, package)
    if python or _OTHER_PYTHON.search(text):
        problem = f"{package or 'a package'} is not available for this Python{python and f': it needs Python {python}'}"
        return InstallFailure(problem, "set 'python' in the hosts file to another one")
    lacking = _tested_version_lacking(text)
    if lacking or re.search(r"No matching distribution|was not found in the|there is no version of", text):
        newest = re.search(r"from versions: (?!none)(?:.*, )?([^,)]+)\)", text)
        offer = f"; the newest there is {newest[1]}" if newest else ""
        problem = f"the package index has no {lacking or package or 'such package'} for this Python and system{offer}"
        fix = "pip config list shows which index is asked, and a mirror may lack it; or set 'python' in the hosts file"
        return InstallFailure(problem, fix)
    if "ResolutionImpossible" in text or "requirements are unsatisfiable" in text:
        fix = "pip config list shows versions that are demanded here; else report it, with the log"
        return InstallFailure(f"versions exclude each other: {_conflict(text)}", fix)
    return None


def _python_for(text: str, package: str) -> str:
    """Return the versions of Python that a package takes; empty where they are not the reason."""
    if supported := re.search(r"only supports (.+?)\)", text):
        return supported[1]
    ignored = re.search(r"require a different python version: (.*)", text)
    version = re.escape(package.partition("==")[2])
    taken = ignored and version and re.search(rf"(?:^|; ){version} Requires-Python ([^;]+)", ignored[1])
    return taken[1] if taken else ""


def _tested_version_lacking(text: str) -> str:
    """Return the tested version that an index lacks: pip calls that a conflict of this version with the request."""
    tested = _CONSTRAINT.search(text)
    requests = re.findall(r"The user requested (?!\(constraint\))(.+)", text)
    contradicted = " depends on " in text or any(re.search("==|<|!=|~=", request) for request in requests)
    return tested[1] if tested and not contradicted else ""


def _conflict(text: str) -> str:
    """Return which requirements exclude each other."""
    if match := _CONFLICT.search(text):
        lines = (line.replace("The user requested (constraint)", "tested is") for line in match[1].splitlines())
        return ", ".join(line.replace("The user requested", "asked for").strip() for line in lines)[:_MOST_TEXT]
    causes = [" ".join(cause.split()) for cause in _CONFLICT_OF_UV.findall(text)]
    return "; ".join(causes)[:_MOST_TEXT] or "it does not say which"


def _index(text: str) -> str:
    """Return the host of the package index: that of the line that failed, else the one looked in."""
    failing = re.search(r"(?:Failed to fetch|Could not fetch URL|An index|Looking in indexes).*", text)
    match = _HOST.search(failing[0]) if failing else _HOST.search(text)
    return (match[1] or match[2]) if match else "pypi.org"


def _message(lines: Sequence[str]) -> str:
    """Return the line that says most: the exception at the end of a traceback, else the first error."""
    if any(line.startswith("Traceback") for line in lines):
        raised = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception)\b", line)]
        if raised:
            return raised[-1][:_MOST_TEXT]
    errors = [line for line in lines if re.match(r"(ERROR|error|Error|[×✗])", line)]
    return (errors or [line for line in lines if line] or ["it gave no reason"])[0][:_MOST_TEXT]
