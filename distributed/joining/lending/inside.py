"""``python -IS inside.py DESCRIPTOR MEMORY CORES``: starts programs and opens ports inside a box, for who made it.

It begins before anything else runs there, takes requests from the socket with this number, and ends with it: then the
box ends with all that runs in it. The limits are those of every program that it starts; 0: none. Standard library only.

=================================  ====================================================================================
``{"argv": [...], "env": {...}}``  starts a program, with three descriptors for its streams; a fourth gets its exit code
``{"port": N}``                    listens on a loopback port of the box, 0 for any; the socket goes back over the one
                                   that came along
=================================  ====================================================================================
"""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading

LONGEST, PROCESSES = 1 << 18, 4096
_NO_PROGRAM = 127


def limit(memory: int, cores: int) -> None:
    """Limit this process, and those that it starts.

    Args:
        memory: bytes of data that each may have; 0: no limit.
        cores: that all of them share; 0: no limit.
    """
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(argv: list[str], environment: dict[str, str], descriptors: list[int]) -> None:
    """Start a program with the first three descriptors; its exit code is written to the fourth once it has ended."""
    *streams, result = descriptors
    try:
        process = subprocess.Popen(
            argv, stdin=streams[0], stdout=streams[1], stderr=streams[2], env=environment,
            cwd=environment["HOME"], start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            os.write(streams[2], f"{error}\n".encode())
            os.write(result, b"%d" % _NO_PROGRAM)
        process = None
    for stream in streams:
        os.close(stream)
    if process is None:
        os.close(result)
        return

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(OSError):
            os.write(result, b"%d" % code)
        os.close(result)

    threading.Thread(target=wait, daemon=True).start()


def listen(port: int, reply: int) -> None:
    """Send a socket that listens on a loopback port here; nothing where it is in use."""
    with (
        socket.socket(fileno=reply) as back,
        contextlib.suppress(OSError, OverflowError),
        socket.create_server(("127.0.0.1", port)) as listener,
    ):
        socket.send_fds(back, [b"1"], [listener.fileno()])


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    limit(int(sys.argv[2]), int(sys.argv[3]))
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    most = PROCESSES if most == resource.RLIM_INFINITY else min(most, PROCESSES)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))  # no program takes all processes of its owner
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, LONGEST, 4)
        if not data:
            return 0
        request = json.loads(data)
        if "port" in request:
            listen(request["port"], *descriptors)
        else:
            run(request["argv"], request["env"], descriptors)


if __name__ == "__main__":
    sys.exit(main())
