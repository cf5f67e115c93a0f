"""What an agent says, line by line: read with bounds, for a machine is checked for who it is and not believed."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.bounded import Count, Text


class Greeting(BaseModel):
    """The first line after it was attached to."""

    model_config = ConfigDict(frozen=True)

    commands: Count = 0
    """How many it has carried out."""
    gone: bool = False

    @classmethod
    def parse(cls, line: bytes) -> Greeting:
        """Raises ``ValueError`` where something else than an agent answers."""
        try:
            return cls.model_validate_json(line)
        except ValidationError:
            raise ValueError("something other than its agent answered") from None


class Record(BaseModel):
    """Any other line: a beat, which has no number, or the next record of the agent's spool."""

    model_config = ConfigDict(frozen=True)

    seq: Count = 0
    event: str = ""
    """A line of the worker."""
    log: str = ""
    pid: int | None = Field(None, ge=1, lt=1 << 31)
    end: int | None = Field(None, ge=-255, le=255)
    """Exit code of the worker."""
    why: Text = ""
    """Why the agent has ended it."""


def first_problem(error: ValidationError) -> str:
    """Return what is wrong, without what was sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
