"""Labs for the tests of what happens between machines."""

from tests.lab.fixtures import make_lab, make_light_lab

__all__ = ["make_lab", "make_light_lab"]
