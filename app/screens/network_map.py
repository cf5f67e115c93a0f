"""The map of the measured links, for Links and for what is decided from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from app.shell.link_map import LinkMedium, MapLink, drawn, legend
from app.wizard.state.state import WizardState

if TYPE_CHECKING:  # pydantic, which the first screen does without
    from distributed.measuring.link_figures import PairFigures

_LEAST_HEIGHT = 40
"""Lines of a terminal from which a screen has room for the map beside its own contents."""
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
    if height < _LEAST_HEIGHT or not links:
        return Content("")
    drawing = drawn(names, links, width - 4, height // _MAP_SHARE, ascii_only=ascii_only)
    return Content("\n").join([drawing, legend(links)]) if drawing else drawing
