"""Write docs/reference/options.md, the page of all options.

.venv/bin/python docs/make_options.py
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from profiles.declarations import owners
from profiles.files.ini import write_atomically
from profiles.options import OptionSpec, options, sections

PAGE = ROOT / "docs" / "reference" / "options.md"

_INTRODUCTION = """# Options

Every option of a run. Set one in an INI file (`learning_rate = 1e-4`), or for one run on the command line
(`--set learning_rate=1e-4`). Options marked * are for special cases; forms show them under "Advanced".

An option of one strategy has its name before it: `diloco.sync_interval`. Where another name is given as well, that
means the option of the chosen strategy: `sync_interval = 20` sets `streaming_diloco.sync_interval` with
`strategy = streaming_diloco`, and the one it is written beside where the strategy has none, or is `auto`. In `a + b` it
is set for each part that has one.

This page is made from `profiles/schema.py`, and from the files of strategies, tasks and codecs, by
`.venv/bin/python docs/make_options.py`.

## Where values come from

`config.ini` inherits, and later wins:

```
[DEFAULT] -> [dataset_defaults] -> [group:G] -> [model:M] -> [dataset:D]
    -> [profile:P] -> [distributed:P] -> variables -> command line
```

An environment variable sets an option too: `MUSTER_LEARNING_RATE=1e-4`, `MUSTER_DILOCO_SYNC_INTERVAL=50` for
`diloco.sync_interval`, `MUSTER_DATASET=~/recordings`. It stands above the files, so that a script or a container can
set it for all its commands, and is ignored by a job that does not read it. An empty one sets nothing, and one that
looks like a misspelt option is named. Trainers and sessions in Python read none.

A profile chooses its sections with `group = G` (several by comma), `model = M` and `dataset = D`. A model or data set
without a section is a path or a hub name: `dataset = ~/recordings`, `model = openai/whisper-small`. Choosing one also
chooses its path, so `--dataset FOLDER` replaces whatever the profile has. Relative paths in an INI file are relative to
the folder of that file, on the command line to the current folder. A comment stands on its own line, or behind a value
after ` #`. An unknown key or section is an error that names the nearest known one.

An option that only some tasks read says so: "(task whisper)". Set for another task, on the command line or in the
profile itself, it is refused by name; inherited from a group, a model or a default, it is not. So are options of a
strategy that is not chosen; `auto` and a strategy of your own take those of all.

`profiles show NAME --origin` shows every value and the line or variable it came from, `profiles validate` finds
mistakes. Profiles of your own can also be files: `profiles/saved/NAME.ini` with a section `[profile:NAME]`.
"""


def markdown() -> str:
    """Return the reference page."""
    parts = [_INTRODUCTION]
    specs = {place: list(group) for place, group in groupby(options(), key=lambda spec: (spec.section, spec.owner))}
    for section, declared in sections().items():
        parts.append(f"\n## {section.capitalize()}\n\n{declared.__doc__}\n\n")
        parts.append(_table(specs[section, ""]))
        for name, owner in owners(section).items():
            parts.append(f"\n### {name}\n\n{owner.summary[:1].upper()}{owner.summary[1:]}.\n")
            parts += ["\n", _table(specs[section, name])] if (section, name) in specs else []
        if section == "strategy":
            parts.append("\n### Codecs\n\n| codec | what it costs and loses |\n|---|---|\n")
            parts += [f"| `{codec.form}` | {codec.summary} |\n" for codec in owners("codec").values()]
    return "".join(parts)


def _table(specs: list[OptionSpec]) -> str:
    rows = "".join(map(_row, specs))
    return f"| option | type | default | what it is |\n|---|---|---|---|\n{rows}"


def _row(spec: OptionSpec) -> str:
    mark = " *" if spec.advanced else ""
    default = f"`{spec.default}`" if spec.default else ""
    alias = f" (also `{spec.alias}`)" if spec.alias else ""
    return f"| `{spec.name}`{mark}{alias} | {spec.type} | {default} | {spec.about} |\n"


if __name__ == "__main__":
    write_atomically(PAGE, markdown())
