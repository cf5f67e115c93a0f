"""Muster's program on a machine: carries out one request of :mod:`distributed.agent.requests`.

Standard library only, Python >= 3.9, as are the modules that it is sent with: it runs before anything is installed. It
is one file in Muster's folder there, or the argument of ``python -c`` where nothing may be written::

    python agent.py ROOT TITLE...   < a request

A machine that takes no program of others runs its own Muster's instead: ``python -m distributed.agent.program``.

``ROOT`` is Muster's folder. The title tells others which run a process belongs to; what is to be done stands in the
request.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tarfile
from pathlib import Path

from distributed.agent.requests import read_request


def main() -> int:
    """Carry out the request on standard input; return the exit code."""
    os.umask(0o077)
    try:
        root = Path(sys.argv[1]).expanduser().resolve()
        request = read_request(lambda size: os.read(0, size))
        reply = getattr(importlib.import_module(request.module), request.function)(root, request)
    except (OSError, ValueError, EOFError, ImportError, tarfile.TarError) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 1
    if reply is not None:
        print(json.dumps(reply))
    return 0


if __name__ == "__main__":
    sys.exit(main())
