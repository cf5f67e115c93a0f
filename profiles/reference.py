"""The options as documents: ``docs/options.md`` and a commented INI section.

::

    python -m profiles.reference          # writes docs/options.md
    python -m profiles.reference ini      # prints [DEFAULT] with every option, commented out
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from profiles.ini import write_atomically
from profiles.options import OptionSpec, options, sections

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"

_INTRODUCTION = """# Options

Every option of a run. Set one in an INI file (`learning_rate = 1e-4`), or for one run on the command line
(`--set learning_rate=1e-4`). Options marked * are for special cases; forms show them under "Advanced".

This page is made from `profiles/schema.py` by `.venv/bin/python -m profiles.reference`.

## Where values come from

`config.ini` inherits, and later wins:

```
[DEFAULT] -> [dataset_defaults] -> [group:G] -> [model:M] -> [dataset:D]
    -> [profile:P] -> [distributed:P] -> command line
```

A profile chooses its sections with `group = G` (several by comma), `model = M` and `dataset = D`. A model or data set
without a section is a path or a hub name: `dataset = ~/recordings`, `model = openai/whisper-small`. Choosing one also
chooses its path, so `--dataset FOLDER` replaces whatever the profile has. Relative paths in an INI file are relative to
the folder of that file, on the command line to the current folder. A comment stands on its own line, or behind a value
after ` #`. An unknown key or section is an error that names the nearest known one.

An option that only some tasks read says so: "(task whisper)". Set for another task, on the command line or in the
profile itself, it is refused by name; inherited from a group, a model or a default, it is not.

`profiles show NAME --origin` shows every value and the line it came from, `profiles validate` finds mistakes. Profiles
of your own can also be files: `profiles/saved/NAME.ini` with a section `[profile:NAME]`.
"""


def markdown() -> str:
    """Return the reference page."""
    parts = [_INTRODUCTION]
    for section, specs in groupby(options(), key=lambda spec: spec.section):
        parts.append(f"\n## {section.capitalize()}\n\n{sections()[section].__doc__}\n\n")
        parts.append("| option | type | default | what it is |\n|---|---|---|---|\n")
        parts += [_row(spec) for spec in specs]
    return "".join(parts)


def ini_block(specs: Iterable[OptionSpec]) -> str:
    """Return each option with its default, commented out under its help, as INI lines."""
    lines = []
    for spec in specs:
        lines += textwrap.wrap(spec.about, 118, initial_indent="# ", subsequent_indent="#   ")
        lines += [f"#{spec.name} = {spec.default}".rstrip(), ""]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write the page, or print the INI section."""
    if arguments == ["ini"]:
        print("[DEFAULT]\n" + ini_block(options()), end="")
        return 0
    write_atomically(PAGE, markdown())
    return 0


def _row(spec: OptionSpec) -> str:
    mark = " *" if spec.advanced else ""
    default = f"`{spec.default}`" if spec.default else ""
    return f"| `{spec.name}`{mark} | {spec.type} | {default} | {spec.about} |\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
