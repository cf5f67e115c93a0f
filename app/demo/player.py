"""Plays a script in its time and obeys requests like a run that trains."""

from __future__ import annotations

import time

from app.demo.beats import Beat
from app.demo.requests_desk import ScriptedDesk, Stopped
from app.demo.script import Script, metrics_of
from app.demo.stage import Stage
from distributed.run.prediction import prediction_metrics
from training.events import RunEvent
from training.run_folder import RunFolder

_POLL = 0.05


def play(run: RunFolder, script: Script, speed: float = 1.0) -> str:
    """Write a run as its script says, each thing when it is due; return how it ended.

    Args:
        run: held by this process.
        speed: how much faster than the script.
    """
    began = time.time()
    played: list[Beat] = []
    with Stage(run, began, speed) as stage:
        desk = ScriptedDesk(stage)
        try:
            for beat in script.beats:
                _wait(stage, desk, beat.at)
                stage.write(beat)
                played.append(beat)
            _wait(stage, desk, script.ends)
        except Stopped as stop:
            stage.say(RunEvent(status="cancelled", message=str(stop)), time.time())
            desk.close("cancelled")
            run.finish("cancelled", metrics_of(played, time.time() - began), str(stop))
            return "cancelled"
        stage.say(RunEvent(status="completed"), time.time())
        desk.close("completed")
        metrics = metrics_of(played, time.time() - began)
        run.finish("completed", {**metrics, **(prediction_metrics(run) if speed == 1.0 else {})})
        return "completed"


def _wait(stage: Stage, desk: ScriptedDesk, at: float) -> None:
    """Wait until something of the script is due, carrying out requests meanwhile."""
    while True:
        desk.poll()
        left = stage.due(at) - time.time()
        if desk.paused:
            time.sleep(_POLL)
        elif left <= 0:
            return
        else:
            time.sleep(min(left, _POLL))
