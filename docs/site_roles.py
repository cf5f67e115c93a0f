"""An extension of Griffe for the site: roles of Sphinx in docstrings become the names that they name.

Docstrings say ``:class:`~training.local_trainer.LocalTrainer```, which editors understand; Markdown does not. As in
Sphinx, ``~`` leaves the last word of the name.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`(?:~(?:\w+\.)*)?([\w.]+)`")


class SphinxRoles(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
