"""Draw docs/pictures/demo.svg from the events of a real run, at the moment a share of its steps was done.

.venv/bin/python docs/make_pictures.py RUN [--at 0.6]
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console

from app.run_state import RunState, apply
from app.run_view import RunView
from distributed.runs import find_run
from training.events import StepEvent
from training.run_folder import RunFolder


def state_at(folder: RunFolder, share: float) -> tuple[RunState, float]:
    """Return the state of a run when ``share`` of its steps was done, and the time of its last event then."""
    events = list(folder.events())
    until = share * max(e.step for e in events if isinstance(e, StepEvent))
    state, now = RunState(), 0.0
    for event in events:
        if isinstance(event, StepEvent) and event.step > until:
            break
        state, now = apply(state, event), event.time
    return state, now


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--at", type=float, default=0.6)
    parser.add_argument("--output", type=Path, default=ROOT / "output")
    arguments = parser.parse_args()
    folder = RunFolder.open(find_run(arguments.output, arguments.run))
    state, now = state_at(folder, arguments.at)
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    plan = folder.plan()
    title = f"{plan.profile.name} · {plan.world_size} workers · {plan.profile.strategy.strategy} over {plan.engine}"
    console.print(RunView(title, state, now))
    target = ROOT / "docs" / "pictures" / "demo.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(console.export_svg(title="make demo"))


if __name__ == "__main__":
    main()
