"""Make ``input.txt``: a free text for a small language model.

    python examples/nanogpt/make_text.py > examples/nanogpt/input.txt

A grammar writes a harbour master's log book. It has something to learn at every range: spelling, verbs that agree with
their subjects, ships that come back under the same name within an entry, and sums that are right. Nobody's words are
in it, so it is free of any licence (CC0).
"""

from __future__ import annotations

import random
import sys

ENTRIES = 620
SEED = 7

SHIPS = (
    "Heron",
    "Petrel",
    "Morning Star",
    "Old Margaret",
    "Swift",
    "Northern Light",
    "Juniper",
    "Albatross",
    "Kestrel",
)
PORTS = ("Bergen", "Lisbon", "Hull", "Bilbao", "Riga", "Cadiz", "Leith", "Ostend", "Gdansk")
CARGO = ("barrel", "crate", "sack", "bale", "chest", "cask")
GOODS = ("oranges", "salt", "rope", "tea", "copper", "wool", "lamp oil", "slate", "cheese")
WEATHER = ("fair", "foggy", "grey", "clear", "wild", "still")
WINDS = ("north", "south", "east", "west")
PEOPLE = ("the pilot", "the cook", "the mate", "a young sailor", "the harbour master", "the customs clerk")
SOUNDS = ("a bell", "a gull", "the tide", "an oar", "a winch", "the rain")
UNITS = (
    "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = ("twenty", "thirty", "forty")


def number(value: int) -> str:
    """Write a number below 50 in words."""
    if value < 20:
        return UNITS[value]
    tens, units = divmod(value, 10)
    return TENS[tens - 2] + (f"-{UNITS[units]}" if units else "")


def count(value: int, noun: str) -> str:
    """``three barrels``, ``one barrel``."""
    return f"{number(value)} {noun}" + ("" if value == 1 else "s")


def opening(day: int, dice: random.Random) -> str:
    wind = dice.choice(WINDS)
    return f"Day {day}. The morning was {dice.choice(WEATHER)}, with the wind from the {wind}."


def arrival(ship: str, dice: random.Random) -> str:
    noun, goods = dice.choice(CARGO), dice.choice(GOODS)
    carried, taken = dice.randint(2, 40), 0
    taken = dice.randint(1, carried)
    left = carried - taken
    return (
        f"The {ship} came in from {dice.choice(PORTS)} with {count(carried, noun)} of {goods}. "
        f"{dice.choice(PEOPLE).capitalize()} took {number(taken)} ashore, so {count(left, noun)} stayed on board."
    )


def damage(ship: str, dice: random.Random) -> str:
    who = dice.choice(PEOPLE)
    sails, new = dice.randint(1, 6), dice.randint(1, 6)
    return (
        f"{who.capitalize()} counted {count(sails, 'torn sail')} on the {ship} and ordered {count(new, 'new one')}: "
        f"{number(sails)} and {number(new)} make {number(sails + new)}."
    )


def evening(ship: str, dice: random.Random) -> str:
    who, sound = dice.choice(PEOPLE), dice.choice(SOUNDS)
    return dice.choice(
        (
            f'"Is the {ship} ready?" asked {who}. "She is," I said, and she sailed at {number(dice.randint(1, 12))}.',
            f"At night {who} heard {sound}, but when we looked, the {ship} was lying quietly at her ropes.",
            f"We lit the lamp, and until morning there was nothing but {sound}. The {ship} stays another day.",
        )
    )


def entry(day: int, dice: random.Random) -> str:
    """One day in the log book."""
    ship = dice.choice(SHIPS)
    parts = [opening(day, dice), arrival(ship, dice)]
    if dice.random() < 0.6:
        parts.append(damage(ship, dice))
    return " ".join([*parts, evening(ship, dice)])


def text(entries: int = ENTRIES, seed: int = SEED) -> str:
    """The whole log book."""
    dice = random.Random(seed)
    return "\n\n".join(entry(day, dice) for day in range(1, entries + 1)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
