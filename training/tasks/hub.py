"""Reading models and data sets from the Hugging Face hub, with errors a person can act on."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from profiles.errors import BadInput

T = TypeVar("T")

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def check_model_path(path: str) -> bool:
    """Return whether ``path`` is a local folder (otherwise it is a hub name).

    Raises:
        BadInput: empty, a file, or neither a folder that is there nor a possible hub name.
    """
    if not path:
        raise BadInput("no model was given", "set model_path to a hub name or a folder")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise BadInput(f"model {path}: no config.json in this folder", "name the folder of a saved model")
        return True
    if folder.exists() or not _HUB_NAME.fullmatch(path):
        raise BadInput(f"model {path}: no such folder", "check model_path")
    return False


def reachable() -> bool:
    """Whether the hub's name resolves (or a proxy does that for us). The hub's own client takes 23 s to find out."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def load(path: str, what: str, read: Callable[[bool], T]) -> T:
    """Call ``read(local_files_only)`` and turn what goes wrong into one line.

    Args:
        path: the model's folder or hub name.
        what: what is read, for the message ("model", "tokenizer").

    Raises:
        BadInput: not found, not readable, or not of the kind wanted.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights: the worker has its own display
    local = check_model_path(path)
    online = not local and reachable()
    try:
        return read(not online)
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError, SafetensorError) as error:
        # what from_pretrained raises for names that are not there and for folders that are damaged
        raise _refused(path, what, local, online, error) from error


def _refused(path: str, what: str, local: bool, online: bool, error: Exception) -> BadInput:
    reason = " ".join(str(error).split())[:200]
    if local:
        return BadInput(f"{what} {path} cannot be read: {reason}", "name the folder of a saved model")
    if not online:
        message = f"{what} {path}: no such folder, and the hub cannot be reached to look it up"
        alone = "; without it, profile whisper-scratch trains from scratch on clips of up to 30 s"
        hint = "check the name, connect to the network, or use a folder"
        return BadInput(message, hint + (alone if "whisper" in path.lower() else ""))
    if "gated" in reason or "401" in reason or "403" in reason:
        return BadInput(f"{what} {path}: the hub does not let you read it", "log in with 'hf auth login'")
    return BadInput(f"{what} {path} not found on the hub: {reason}", "check the name or use a folder")
