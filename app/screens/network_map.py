"""The maps of a set-up's machines: of the measured links, and of the ways to them before these are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from app.shell.keys import TALL
from app.shell.link_map import LinkMedium, MapLink, drawn, legend
from app.shell.text import muted
from app.wizard.state.state import WizardState

if TYPE_CHECKING:  # pydantic, which the first screen does without
    from distributed.measuring.link_figures import PairFigures

_MAP_SHARE = 3


def map_link(pair: PairFigures) -> MapLink:
    """Return a link for the map."""
    link = pair.link
    kind = LinkMedium.AIR if link.air else LinkMedium.CABLE if link.usable else LinkMedium.RELAY
    return MapLink(pair.source, pair.target, kind, link.mbit, link.mbit_back)


def map_where_there_is_room(state: WizardState, width: int, height: int, ascii_only: bool) -> Content:
    """Return the map of a set-up's machines for a screen of this size; empty where it has no room, or no link."""
    names = [row.name for row in state.members]
    links = [map_link(pair) for pair in state.links.value if {pair.source, pair.target} <= {*names}]
    if height < TALL or not links:
        return Content("")
    drawing = drawn(names, links, width - 4, height // _MAP_SHARE, ascii_only=ascii_only)
    return Content("\n").join([drawing, legend(links)]) if drawing else drawing


def ways_from_here(state: WizardState, width: int, height: int, ascii_only: bool) -> list[Content]:
    """Return a map of the ways from this computer to the picked machines, with what it shows; empty: no room, or none.

    A way is drawn by the network card of this computer that leads there; the best one of each machine.
    """
    from distributed.discovery.network_interfaces import PathKind

    media = {PathKind.WIRED: LinkMedium.CABLE, PathKind.LINK_LOCAL: LinkMedium.CABLE, PathKind.WIFI: LinkMedium.AIR}
    names = [row.name for row in sorted(state.picked, key=lambda row: not row.here)]
    links = []
    for row in state.picked:
        kinds = [path.endpoint.kind for path in row.paths if path.online]
        if kinds and not row.here:
            best = min(kinds, key=lambda kind: kind.rank)
            links.append(MapLink(names[0], row.name, media.get(best, LinkMedium.ROUTED)))
    drawing = drawn(names, links, width - 8, height // _MAP_SHARE, ascii_only=ascii_only)
    if not drawing or not links or not any(row.here for row in state.picked):
        return []
    caption = muted("How this computer reaches them; Links measures how fast, and between the others.")
    return [caption, Content(""), drawing, legend(links)]
