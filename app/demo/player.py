"""Plays a script in its time and obeys requests like a run that trains."""

from __future__ import annotations

import time

from app.demo.beats import Beat
from app.demo.script import Script, metrics_of
from app.demo.stage import Stage
from app.demo.training_script import snapshot_event
from distributed.requests import take_requests
from training.events import MemberEvent, RunEvent, WarningEvent
from training.run_folder import RunFolder

_POLL = 0.05
_PAUSED_BY = "paused by the user"


class _Stopped(Exception):
    """The user stopped the run."""


def play(run: RunFolder, script: Script, speed: float = 1.0) -> str:
    """Write a run as its script says, each thing when it is due; return how it ended.

    Args:
        run: held by this process.
        speed: how much faster than the script.
    """
    began = time.time()
    played: list[Beat] = []
    with Stage(run, began, speed) as stage:
        try:
            for beat in script.beats:
                _wait(stage, beat.at)
                stage.write(beat)
                played.append(beat)
            _wait(stage, script.ends)
        except _Stopped as stop:
            return _end(stage, "cancelled", str(stop), metrics_of(played, time.time() - began))
        return _end(stage, "completed", "", {**script.metrics, "seconds": time.time() - began})


def _end(stage: Stage, status: str, message: str, metrics: dict[str, object]) -> str:
    event = RunEvent.model_validate({"status": status, "message": message})
    stage.say(event, time.time())
    stage.folder.finish("cancelled" if status == "cancelled" else "completed", metrics, message)
    return status


def _wait(stage: Stage, at: float) -> None:
    """Wait until something of the script is due, carrying out requests meanwhile."""
    while True:
        for action in take_requests(stage.folder.path):
            _obey(stage, action)
        left = stage.due(at) - time.time()
        if left <= 0:
            return
        time.sleep(min(left, _POLL))


def _obey(stage: Stage, action: str) -> None:
    if action == "pause":
        _pause(stage)
    elif action == "snapshot":
        _snapshot(stage)
    elif action == "stop":
        _snapshot(stage)
        for rank in _live(stage):
            name = stage.folder.plan().members[rank].name
            stage.say(MemberEvent(member=rank, status="left", name=name, message="stopped by the user"), time.time())
        raise _Stopped("stopped")
    elif action == "kill":
        raise _Stopped("ended by the user")
    elif action != "resume":
        stage.say(WarningEvent(message=f"the script has no answer to '{action}'"), time.time())


def _pause(stage: Stage) -> None:
    """Stand still until the user goes on; what is to come moves by as much."""
    began = time.time()
    for rank in _live(stage):
        stage.say(RunEvent(member=rank, status="paused", message=_PAUSED_BY), began)
    while True:
        for action in take_requests(stage.folder.path):
            if action == "resume":
                stage.shift(time.time() - began)
                for rank in _live(stage):
                    running = RunEvent(member=rank, status="running", total_steps=stage.total_steps)
                    stage.say(running, time.time())
                return
            if action != "pause":
                _obey(stage, action)
        time.sleep(_POLL)


def _snapshot(stage: Stage) -> None:
    step = max((stage.steps[rank] for rank in _live(stage) if rank in stage.steps), default=0)
    for rank in _live(stage) if step else ():
        stage.say(snapshot_event(rank, step), time.time())


def _live(stage: Stage) -> list[int]:
    return [rank for rank in range(stage.folder.plan().world_size) if rank not in stage.gone]
