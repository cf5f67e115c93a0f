"""Recording from this machine's microphone."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from app.console import say
from profiles.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

RATE = 16_000
MOST_SECONDS = 3600.0


def hear_microphone(seconds: float) -> Samples:
    """Record mono samples at :data:`RATE` Hz from the default input device; Ctrl-C ends it earlier.

    Raises:
        BadInput: nothing can be recorded; the message says why.
    """
    import numpy as np

    try:
        library: Any = importlib.import_module("sounddevice")
    except ImportError as error:
        hint = "install it with: pip install 'muster-train[microphone]'"
        raise BadInput("no microphone: the package sounddevice is not installed", hint) from error
    except OSError as error:  # the package without PortAudio
        hint = "on Debian and Ubuntu: apt install libportaudio2"
        raise BadInput("no microphone: the library PortAudio is not installed", hint) from error
    say(f"speak now, for {seconds:g} s{'; Ctrl-C ends it earlier' if sys.stdin.isatty() else ''}")
    blocks: list[Any] = []
    try:
        stream = library.InputStream(samplerate=RATE, channels=1, dtype="float32")
        with stream, contextlib.suppress(KeyboardInterrupt):
            for left in range(round(seconds * 10), 0, -1):
                blocks.append(stream.read(RATE // 10)[0][:, 0].copy())
                if left % 50 == 0:
                    say(f"{left // 10} s left")
    except library.PortAudioError as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"no microphone can be used here: {reason}", "connect one, or name a sound file") from error
    return np.concatenate(blocks) if blocks else np.empty(0, np.float32)


@contextlib.contextmanager
def recorded(seconds: float, hear: Callable[[float], Samples] = hear_microphone) -> Iterator[Path]:
    """Record into a temporary file.

    Raises:
        BadInput: there is no microphone, nothing was recorded, or the time is out of bounds.
    """
    if not 0.1 <= seconds <= MOST_SECONDS:
        raise BadInput(f"{seconds:g} s cannot be recorded", f"from 0.1 to {MOST_SECONDS:g}")
    samples = hear(seconds)
    if not len(samples):
        raise BadInput("nothing was recorded", "record for longer")
    import soundfile

    with TemporaryDirectory(prefix="muster-") as folder:
        path = Path(folder) / "microphone.wav"
        soundfile.write(path, samples, RATE)
        yield path
