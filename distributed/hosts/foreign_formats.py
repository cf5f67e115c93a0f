"""Recognises machine lists of other tools, to tell the user how to write ours."""

from __future__ import annotations

import json
import re

from distributed.hosts.schema import short
from profiles.errors import BadInput

_HOST = r"(?:[\w.-]+@)?[\w.-]*\w"
_SLOTS = re.compile(rf"({_HOST})(?::\d+)?\s+(?:slots|max_slots|max-slots)\s*=\s*\d+.*")
_LONGEST_HINT = 400


def refuse_foreign(text: str, source: str) -> None:
    """Refuse the hosts file of another tool, and show the same machines in our format.

    Raises:
        BadInput: it is one; any other text is ignored.
    """
    recognised = _of_mlx(text) if text.lstrip()[:1] in ("{", "[") else _of_lines(text)
    if recognised is None:
        return
    tool, machines = recognised
    example = {"master": machines[0], "workers": machines[1:]} if machines else {"master": "a.local", "workers": ["b"]}
    hint = f"write {'these machines' if machines else 'the machines'} as {json.dumps(example, ensure_ascii=False)}"
    raise BadInput(f"{source}: this is {tool}, not a hosts file of Muster", short(hint, _LONGEST_HINT))


def _of_mlx(text: str) -> tuple[str, list[str]] | None:
    try:
        top = json.loads(text)
    except (ValueError, RecursionError):
        return None
    entries = top.get("hosts") if isinstance(top, dict) else top
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        return None
    names = [entry.get("ssh") for entry in entries]
    return ("a hostfile of mlx.launch", list(map(str, names))) if all(names) else None


def _of_lines(text: str) -> tuple[str, list[str]] | None:
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    keys = {match[1]: match[2].strip("'\" ") for line in lines if (match := re.match(r"-?\s*(\w+)\s*:\s*(.*)", line))}
    if {"compute_environment", "main_process_ip", "num_machines", "machine_rank"} & keys.keys():
        main = keys.get("main_process_ip", "")
        return "a configuration of accelerate, which knows the main machine only", _unless_null(main)
    if {"head_ip", "worker_ips", "cluster_name"} & keys.keys():
        workers = re.findall(r"[\w.-]+", keys.get("worker_ips", ""))
        return "a cluster file of Ray", [*_unless_null(keys.get("head_ip", "")), *workers]
    slots = [_SLOTS.fullmatch(line) for line in lines]
    if lines and all(slots):
        return "a hostfile of DeepSpeed or MPI", [match[1] for match in slots if match]
    if lines and all(re.fullmatch(_HOST, line) for line in lines):
        return "a list of names", list(dict.fromkeys(lines))
    return None


def _unless_null(value: str) -> list[str]:
    return [] if value in ("", "null", "~") else [value]
