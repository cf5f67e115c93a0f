"""A set-up that was opened with a hosts file begins with its machines."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from app.wizard.engine import Wizard
from app.wizard.services.services import Services
from app.wizard.state.state import Step
from tests.waiting import until_state
from tests.wizard.fake_services import BERT, FakeServices


def test_only_its_machines_are_picked() -> None:
    services = FakeServices(hosts=Path("bert.json"), saved={"demo": (BERT,)})
    with closing(Wizard(services)) as wizard:
        until_state(wizard, lambda state: [row.name for row in state.picked] == ["bert"])
        assert wizard.state.step is Step.MACHINES


def test_they_take_the_place_of_a_profiles_machines(tmp_path: Path) -> None:
    with closing(Services(tmp_path / "config.ini", hosts=Path("ada@studio,mini"))) as services:
        assert [row.name for row in services.saved_machines("demo")] == ["studio", "mini"]
