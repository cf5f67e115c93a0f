"""Labs for the set-up's tests with real SSH servers."""

from tests.lab.fixtures import make_lab, make_light_lab

__all__ = ["make_lab", "make_light_lab"]
