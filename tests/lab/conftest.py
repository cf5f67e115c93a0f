"""Lab fixtures for the tests of the lab itself."""

from tests.lab.fixtures import make_lab, make_light_lab

__all__ = ["make_lab", "make_light_lab"]
