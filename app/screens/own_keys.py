"""The user's key bindings."""

from __future__ import annotations

from app.shell.keymap import keymap_file, read_keymap


def own_keys() -> dict[str, str]:
    """Return the user's keys by action, validated against every screen; loads nothing if there are none.

    Raises:
        BadInput: see :func:`app.shell.keymap.read_keymap`.
    """
    if not keymap_file().exists():
        return {}
    import app.dashboard.screen  # noqa: F401 - its keys are known once it is loaded
    from app.screens.app import load_screens

    load_screens()
    return read_keymap()
