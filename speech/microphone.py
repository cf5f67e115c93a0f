"""Recording from this machine's microphone."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from app.console import say
from profiles.errors import BadInput
from profiles.installation import package_line
from profiles.quantities import span_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

RATE = 16_000
MOST_SECONDS = 3600.0
_BLOCKS = 10
"""Blocks read in a second."""
_SILENCE = 1e-3
"""Peak, of 1.0, of a recording in which nobody speaks; one that the system withholds is all zeros."""
_INSTEAD = "or transcribe a sound file"


def hear_microphone(seconds: float) -> tuple[Samples, int]:
    """Record mono samples from the default input device; Ctrl-C ends it earlier.

    Returns:
        The samples, and their rate in Hz: :data:`RATE`, or the device's own where it has no other.

    Raises:
        BadInput: nothing can be recorded; the message says why.
    """
    import numpy as np

    library = _library()
    device = _input_device(library)
    rate, channels = _format(library, device)
    blocks: list[Any] = []
    try:
        stream = library.InputStream(samplerate=rate, channels=channels, dtype="float32")
        with stream, contextlib.suppress(KeyboardInterrupt):
            for left in range(round(seconds * _BLOCKS), 0, -1):
                if not blocks or left % (5 * _BLOCKS) == 0 or (left < 5 * _BLOCKS and left % _BLOCKS == 0):
                    _say_left(left / _BLOCKS)
                blocks.append(stream.read(rate // _BLOCKS)[0].mean(axis=1))
    except library.PortAudioError as error:
        raise _refused(device, error) from error
    return np.concatenate(blocks) if blocks else np.empty(0, np.float32), rate


def _say_left(seconds: float) -> None:
    say(f"speak now: {span_text(seconds)} left{'; Ctrl-C ends it earlier' if sys.stdin.isatty() else ''}")


def _library() -> Any:
    """Import sounddevice."""
    try:
        return importlib.import_module("sounddevice")
    except ImportError as error:
        if not _may_have_microphone():
            raise _no_microphone() from error
        problem = "no microphone: the package sounddevice is not installed"
        raise BadInput(problem, package_line("sounddevice")) from error
    except OSError as error:  # the package without PortAudio
        hint = "on Debian and Ubuntu: apt install libportaudio2"
        raise BadInput("no microphone: the library PortAudio is not installed", hint) from error


def _input_device(library: Any) -> dict[str, Any]:
    try:
        device: dict[str, Any] = library.query_devices(kind="input")
    except (library.PortAudioError, ValueError) as error:  # there is no device; the default one only plays
        raise _no_microphone() from error
    return device


def _no_microphone() -> BadInput:
    return BadInput("this computer has no microphone", f"connect one, {_INSTEAD}")


def _may_have_microphone(root: Path = Path("/")) -> bool:
    """Whether this computer may have one, as far as known without the package: on Linux, an input of a sound card, or
    a server of sounds that may have another."""
    if sys.platform != "linux" or any(root.glob("dev/snd/pcm*c")):
        return True
    servers = ("pulse/native", "pipewire-0")
    return any(any(root.glob(f"run/user/*/{server}")) for server in servers)


def _format(library: Any, device: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rate in Hz and the number of channels to record: the first of the usable formats nearest to ours."""
    rates, channels = (RATE, int(device["default_samplerate"])), (1, device["max_input_channels"])
    formats = [(rate, count) for rate in rates for count in channels]
    for rate, count in formats:
        with contextlib.suppress(library.PortAudioError):
            library.check_input_settings(samplerate=rate, channels=count, dtype="float32")
            return rate, count
    return formats[0]  # opening it tells why


def _refused(device: Mapping[str, Any], error: Exception) -> BadInput:
    reason = re.sub(r"\s*\[PaErrorCode -?\d+\]", "", " ".join(str(error).split()))
    return BadInput(f"the microphone {device['name']} cannot be used: {reason}", f"close what else uses it, {_INSTEAD}")


@contextlib.contextmanager
def recorded(seconds: float, hear: Callable[[float], tuple[Samples, int]] = hear_microphone) -> Iterator[Path]:
    """Record into a temporary file.

    Raises:
        BadInput: there is no microphone, nothing or only silence was recorded, or the time is out of bounds.
    """
    if not 0.1 <= seconds <= MOST_SECONDS:
        raise BadInput(f"{span_text(seconds)} cannot be recorded", f"from 0.1 s to {span_text(MOST_SECONDS)}")
    samples, rate = hear(seconds)
    if not len(samples):
        raise BadInput("nothing was recorded", "record for longer")
    if abs(samples).max() < _SILENCE:
        access = "; on a Mac, allow it to the terminal: System Settings, Privacy & Security, Microphone"
        raise BadInput(
            "the microphone recorded only silence", f"switch it on{access if sys.platform == 'darwin' else ''}"
        )
    import soundfile

    with TemporaryDirectory(prefix="muster-") as folder:
        path = Path(folder) / "microphone.wav"
        soundfile.write(path, samples, rate)
        yield path
