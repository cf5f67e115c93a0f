"""What carries the exchanges, as a person asks for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from profiles.declarations import OptionError

AskedEngine = Annotated[
    Literal["auto", "mesh", "nccl"],
    BeforeValidator(lambda name: {"hub": "mesh", "torch": "auto"}.get(name, name) if isinstance(name, str) else name),
]
"""An engine as a person asks for it, or as earlier versions called it."""

Transport = Literal["auto", "tls"]
"""``auto``: frames that are sealed with keys from a TLS handshake; ``tls``: everything through TLS itself."""

TRANSPORT_HELP = (
    "how the mesh encrypts; tls sends everything through TLS itself instead of sealed frames, with nothing of our own: "
    "slower"
)


def tls_needs_the_mesh(values: Any) -> Any:
    """Have the mesh carry the exchanges if they are to go through TLS: nccl does not encrypt."""
    if not isinstance(values, dict) or values.get("transport") != "tls":
        return values
    if values.get("engine") == "nccl":
        raise OptionError("transport", "engine = nccl does not encrypt: set engine = mesh, or transport = auto")
    return {**values, "engine": "mesh"}
