"""The keys that a person chose, for whoever starts a screen."""

from __future__ import annotations

from app.shell.keymap import keymap_file, read_keymap


def own_keys() -> dict[str, str]:
    """Return them by action, checked against every screen; nothing is loaded for them where there are none.

    Raises:
        BadInput: see :func:`app.shell.keymap.read_keymap`.
    """
    if not keymap_file().exists():
        return {}
    import app.dashboard.screen
    import app.screens.app  # noqa: F401 - their keys are known once they are loaded

    return read_keymap()
