"""Codecs by name; every other file of this folder registers some. Nothing here imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from profiles.declarations import Section, declare, import_all, withdraw
from profiles.errors import BadInput
from training.exchange.codecs.base import Codec


@dataclass(frozen=True)
class CodecFamily:
    """A codec, or a family of codecs with an argument after a colon: ``topk:0.03``."""

    name: str
    make: Callable[[str], Codec]
    """Takes the argument; raises ``ValueError`` if it is invalid."""
    example: str = ""
    """A valid argument, of a family."""


_families: dict[str, CodecFamily] = {}


def register(name: str, make: Callable[[str], Codec], summary: str, example: str = "", argument: str = "") -> None:
    """Register a codec.

    Args:
        name: in settings and on the wire, before a colon.
        make: makes it; for a family, takes the argument and raises ``ValueError`` if it is invalid.
        summary: what it costs and loses, in one line.
        example: a valid argument, of a family.
        argument: what to call it in help.

    Raises:
        ValueError: the name is taken.
    """
    declare("codec", name, summary, Section, f"{name}:{argument}" if example else name, _can_be_made)
    _families[name] = CodecFamily(name, make, example)


def _can_be_made(text: str) -> bool:
    try:
        codec_by_name(text)
    except BadInput:
        return False
    return True


def forget(name: str) -> None:
    """Unregister a codec."""
    del _families[name]
    withdraw("codec", name)


def load() -> None:
    """Import every codec of this folder.

    Raises:
        BadInput: one of them cannot be imported.
    """
    import_all(Path(__file__).parent, __package__)


def codec_by_name(name: str) -> Codec:
    """Return the codec called ``name``, for example ``"bf16"`` or ``"topk:0.03"``.

    Raises:
        BadInput: there is none; the hint names the nearest.
    """
    family_name, colon, argument = name.partition(":")
    family = _families.get(family_name)
    if family is None or (colon and not family.example):
        near = difflib.get_close_matches(name, _families, n=1, cutoff=0.4)
        raise BadInput(f"there is no codec '{name}'", f"did you mean {near[0]}?" if near else f"one of {_examples()}")
    try:
        return family.make(argument)
    except ValueError as error:
        raise BadInput(f"codec '{name}': {error}", f"write for example {family_name}:{family.example}") from None


def example_codecs() -> list[Codec]:
    """Return every codec, and one of each family."""
    return [kind.make(kind.example) for kind in _families.values()]


def _examples() -> str:
    return ", ".join(f"{kind.name}:{kind.example}" if kind.example else kind.name for kind in _families.values())
