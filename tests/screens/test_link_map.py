from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.screens.network_map import ways_from_here
from app.shell.keys import TALL
from app.shell.link_map import IDEAL, LinkMedium, MapLink, drawn, legend
from app.wizard.state.assessment import of_pair, warnings_of
from app.wizard.state.records import ItemStatus
from app.wizard.state.state import Step, TaskKind
from distributed.discovery.machine_identity import FoundPath
from distributed.discovery.network_interfaces import Endpoint, PathKind
from distributed.discovery.sightings import Reachability
from tests.screens.pilot import fixed_clock, run, text
from tests.screens.states import DESK, STRATEGY, STUDIO, at
from tests.wizard.fake_services import pair

NAMES = ("this-pc", "demo-studio", "MacBook", "tower", "mini", "attic", "pc", "nas")


def lines(
    names: tuple[str, ...], kind: LinkMedium = LinkMedium.CABLE, mbit: float = 941, back: float = 938
) -> list[MapLink]:
    return [MapLink(one, other, kind, mbit, back) for one, other in combinations(names, 2)]


def points(line: MapLink) -> int:
    """How much is drawn of the link between two machines that stand side by side, without its rate."""
    shown = drawn((line.source, line.target), [line], 60, 3).plain
    return sum((ord(sign) - 0x2800).bit_count() for sign in shown if 0x2800 <= ord(sign) <= 0x28FF)


@pytest.mark.parametrize(("count", "width", "height"), [(2, 76, 3), (3, 76, 9), (4, 76, 9), (5, 96, 13), (6, 96, 15),
                                                        (7, 116, 17), (8, 136, 19)])  # fmt: skip
def test_two_to_eight_machines_stand_whole_with_a_line_between_every_two(count: int, width: int, height: int) -> None:
    names = NAMES[:count]
    shown = drawn(names, lines(names), width, height).plain.split("\n")
    assert len(shown) <= min(height, IDEAL[count])
    assert max(map(cell_len, shown)) <= width
    assert all(any(name in line for line in shown) for name in names)
    assert "938" in "".join(shown)


@pytest.mark.parametrize(("names", "width", "height"), [
    (NAMES[:1], 100, 30), (NAMES[:3], 30, 9), (NAMES[:5], 76, 5), (NAMES, 76, 30), ((*NAMES, "ninth"), 200, 60),
    (("a", "a"), 80, 9),
])  # fmt: skip
def test_where_there_is_no_room_there_is_no_map(names: tuple[str, ...], width: int, height: int) -> None:
    assert not drawn(names, lines(names), width, height)


def test_a_faster_link_is_thicker() -> None:
    rates = [points(MapLink("a", "b", LinkMedium.CABLE, mbit)) for mbit in (50, 200, 941, 2400)]
    assert rates == sorted(set(rates))


def test_kinds_differ_without_colours() -> None:
    whole, long_dashed, dashed, dotted = sorted((points(MapLink("a", "b", kind)) for kind in LinkMedium), reverse=True)
    assert whole > long_dashed > dashed > dotted > 0


def test_before_links_are_measured_a_tall_terminal_shows_the_ways_from_here() -> None:
    state = replace(at(Step.MACHINES).state, parts={})
    shown = "\n".join(line.plain for line in ways_from_here(state, 160, TALL, False))
    assert "desk" in shown and "studio" in shown and "━━━ cable" in shown and "Mbit/s" not in shown
    path = FoundPath(Endpoint("10.8.0.3", "wg0", 22, PathKind.VPN), Reachability.ONLINE, None)
    studio = replace(STUDIO, paths=(path,))
    far = replace(state, machines=replace(state.machines, rows=(DESK, studio)))
    assert "router or VPN" in ways_from_here(far, 160, TALL, False)[-1].plain


def test_the_slower_direction_decides() -> None:
    assert MapLink("a", "b", LinkMedium.CABLE, 941, 90).thickness == 1


@pytest.mark.parametrize(("line", "label"), [
    (MapLink("a", "b", LinkMedium.CABLE, 941, 938), "938 Mbit/s"),
    (MapLink("a", "b", LinkMedium.AIR, 211, 94), "94-211 Mbit/s"),
    (MapLink("a", "b", LinkMedium.RELAY), "relayed"),
])  # fmt: skip
def test_the_rate_stands_on_the_line(line: MapLink, label: str) -> None:
    assert f" {label} " in drawn(("a", "b"), [line], 60, 3).plain


def test_a_rate_hides_no_other_link_but_that_of_the_chosen_one() -> None:
    plain = drawn(NAMES, lines(NAMES), 116, 17).plain
    chosen = drawn(NAMES, lines(NAMES, mbit=123, back=123), 116, 17, chosen=NAMES[:2]).plain
    assert 0 < plain.count("938") < 28
    assert "123" in chosen


def test_ascii() -> None:
    shown = drawn(NAMES[:3], lines(NAMES[:3]), 76, 9, ascii_only=True).plain
    assert not any(0x2800 <= ord(sign) <= 0x28FF for sign in shown)
    assert "++++" in shown


def test_names_from_the_network_are_shown_and_take_their_cells() -> None:
    shown = drawn(("\x1b[31m[bold]", "電脳電脳電脳電脳電脳電脳"), [], 76, 3).plain.split("\n")
    assert "\\x1b[31m[bold]" in shown[1]
    assert len({cell_len(line) for line in shown}) == 1


def test_the_legend_names_what_is_there() -> None:
    assert legend(lines(NAMES[:2], LinkMedium.AIR)).plain == "╍ ╍ Wi-Fi   Mbit/s; the thicker, the faster"


CABLE = "with a cable to air (941 Mbit/s): 1.90 instead of 1.58 times as fast"


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 32)])
def test_links_says_under_the_map_what_a_cable_would_give(size: tuple[int, int]) -> None:
    steering = at(Step.LINKS)
    steering.state = steering.state.putting(TaskKind.FORECAST, value=replace(STRATEGY, cables=(CABLE,)))

    async def drive(pilot: Pilot[Any]) -> None:
        shown = text(pilot.app)
        assert CABLE in shown and "╍ ╍ Wi-Fi" in shown and "studio > air" in shown
        await pilot.press("down")
        assert " 94-211 " in text(pilot.app)

    run(WizardApp(steering, clock=fixed_clock), drive, size)


@pytest.mark.slow
def test_links_to_this_computer_are_not_shown_where_it_does_not_train() -> None:
    steering = at(Step.LINKS)
    pairs = (pair("this machine", "studio", 940, 94), *steering.state.links.value)
    steering.state = steering.state.putting(TaskKind.LINKS, value=pairs)

    async def drive(pilot: Pilot[Any]) -> None:
        shown = text(pilot.app)
        assert "3 links" in shown and "does not train, it copies: to studio 940 Mbit/s." in shown
        assert "studio > air" in shown and "this computer > studio" not in shown
        assert warnings_of(pairs[0]) == [] and of_pair(pairs[0]).status is ItemStatus.OK

    run(WizardApp(steering, clock=fixed_clock), drive, (120, 32))


def test_names_that_begin_alike_are_told_apart() -> None:
    names = ("whisper-trainer-attic1", "whisper-trainer-cellar", "whisper-trainer-office")
    small, large = drawn(names, lines(names), 76, 9).plain, drawn(names, lines(names), 150, 30).plain
    assert all(name[-6:] in small for name in names)
    assert all(name in large for name in names)


def test_a_large_terminal_has_a_larger_map() -> None:
    names = NAMES[:4]
    small, large = (
        drawn(names, lines(names), width, height).plain.split("\n") for width, height in ((76, 9), (196, 40))
    )
    assert len(large) > len(small) and max(map(cell_len, large)) > 1.3 * max(map(cell_len, small))


def test_a_link_that_is_slower_one_way_is_told_in_one_unit_and_not_at_all_where_it_is_fast() -> None:
    (warning,) = warnings_of(pair("a", "b", 22_500, 540))
    assert warning == "slower one way: 540 Mbit/s, back 22500 Mbit/s; check cable or Wi-Fi at both ends"
    assert warnings_of(pair("a", "b", 22_500, 5_406)) == []
