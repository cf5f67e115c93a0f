"""What every screen and every dialog does alike: it follows the size of the terminal, and says if it is too small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from textual.content import Content
from textual.geometry import Size
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.widgets import Static

if TYPE_CHECKING:
    from app.shell.base_app import MusterApp

LEAST = Size(72, 20)
WIDE, WIDEST = 100, 140


def app_of(node: MessagePump) -> MusterApp:
    """Return the application that a screen or widget is in."""
    return cast("MusterApp", node.app)


def too_small(size: Size) -> bool:
    """Whether a terminal of this size cannot hold a screen."""
    return size.width < LEAST.width or size.height < LEAST.height


class TooSmall(Static):
    """Lies over a screen while the terminal is too small; what is under it keeps its focus and its selection."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    TooSmall {
        layer: above; display: none; width: 100%; height: 100%; dock: top; background: $background;
        content-align: center middle; text-align: center; text-wrap: nowrap;
    }
    .-too-small TooSmall { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)

    def render(self) -> Content:
        width, height = self.app.size
        least = f"needs {LEAST.width}x{LEAST.height}"
        return Content(f"Too small: {width}x{height}, {least}. Or: {app_of(self).headless_command()}")


def fit(screen: Screen[Any], size: Size) -> None:
    """Give a screen the classes that belong to a size: ``-too-small``, ``-narrow``, ``-wide``, ``-widest``."""
    wide, widest = size.width >= WIDE, size.width >= WIDEST
    classes = {"-too-small": too_small(size), "-narrow": not wide, "-wide": wide, "-widest": widest}
    screen.update_classes(classes, animate=False)
