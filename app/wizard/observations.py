"""What the machines' side has to tell the state: results of tasks, and what was seen meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from app.wizard.services import Sight
from app.wizard.state import Launch


class Kind(str, Enum):
    """A part of the state that is worked out by the services."""

    HOME = "home"
    DOCTOR = "doctor"
    SAVED_MACHINES = "saved machines"
    ACCESS = "access"
    INSTALL_KEY = "install key"
    CHECKS = "checks"
    REPAIR = "repair"
    LINKS = "links"
    JOB = "job"
    DATA = "data"
    FITS = "fits"
    FORECAST = "forecast"
    INTERVAL = "interval"
    PLAN = "plan"
    SAVE = "save"
    LAUNCH = "launch"


@dataclass(frozen=True)
class Task:
    """Something to ask the services for."""

    kind: Kind
    key: str = ""
    """Of a machine, a profile or a row; empty where there is only one."""
    stamp: object = None
    """The answers it is asked for: its result counts only while they hold."""


@dataclass(frozen=True)
class Begun:
    task: Task


@dataclass(frozen=True)
class Failed:
    """The services could not do it."""

    task: Task
    cause: str
    fix: str = ""


@dataclass(frozen=True)
class Told:
    """A line about what goes on."""

    task: Task
    line: str


@dataclass(frozen=True)
class Sighted:
    sight: Sight


@dataclass(frozen=True)
class WatchFailed:
    cause: str
    fix: str = ""


@dataclass(frozen=True)
class Done:
    """A task's result, of the type that the service's method returns."""

    task: Task
    found: Any


@dataclass(frozen=True)
class LaunchSeen:
    """How far a launch has come."""

    launch: Launch


Observation = Begun | Failed | Told | Sighted | WatchFailed | Done | LaunchSeen
