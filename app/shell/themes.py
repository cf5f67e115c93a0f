"""The colours. Everything else names them by what they mean."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="muster-dark",
    primary="#7fb4ff",
    secondary="#9d8cff",
    accent="#63d2c0",
    success="#8fd18a",
    warning="#e8c06d",
    error="#f0857d",
    foreground="#d6dce5",
    background="#12151a",
    surface="#191d24",
    panel="#222833",
    dark=True,
    variables={"border": "#2c3441", "text-muted": "#8b96a6", "cursor-line": "#232c3a"},
)
LIGHT = Theme(
    name="muster-light",
    primary="#1b5fb8",
    secondary="#6546c3",
    accent="#0f7d6e",
    success="#2c7a2c",
    warning="#8a5a00",
    error="#b3261e",
    foreground="#20262e",
    background="#fbfbf9",
    surface="#f2f2ee",
    panel="#e7e8e3",
    dark=False,
    variables={"border": "#cfd2cb", "text-muted": "#5f6874", "cursor-line": "#dde8f7"},
)
CONTRAST = Theme(
    name="muster-contrast",
    primary="#66b3ff",
    secondary="#c0a8ff",
    accent="#00ffd0",
    success="#5dff5d",
    warning="#ffd75f",
    error="#ff8080",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1c1c1c",
    dark=True,
    variables={"border": "#808080", "text-muted": "#c0c0c0", "cursor-line": "#333333"},
)
OWN = (DARK, LIGHT, CONTRAST)
ORDER = ("muster-dark", "muster-light", "muster-contrast", "ansi-dark", "ansi-light")
"""What ``t`` goes through; the last two use the sixteen colours of the terminal itself."""
FOR_ALL = {"cursor-line": "ansi_default", "text-muted": "ansi_default"}
"""Variables of ours that foreign themes lack."""


def after(name: str) -> str:
    """Return the theme that ``t`` leads to."""
    place = ORDER.index(name) if name in ORDER else -1
    return ORDER[(place + 1) % len(ORDER)]
