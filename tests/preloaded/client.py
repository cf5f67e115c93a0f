"""Stands for a Python process whose work a copy of the preloaded one does: ``python -IS client.py SOCKET ...``.

It hands its arguments, folder, variables and open files over, passes signals on, and ends as the copy ends. Process
number, session, command line and variables of this process are those that its starter sees. It loads nothing that is
not part of the interpreter itself, which would take longer than all the rest.
"""

from __future__ import annotations

import _signal as signal
import _socket as socket
import marshal
import os
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
FILES_AT_ONCE = 200


def inherited() -> list[int]:
    """Return the numbers of the files that are open here; those of this process's own making are not."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")]


def mask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def main() -> int:
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # those of this moment are for the copy, too
    files = inherited()
    ignored = [int(number) for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    document = {
        "argv": sys.argv[2:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "files": files,
        "ignored": ignored,
        "umask": mask(),
    }
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    data = marshal.dumps(document)
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in files[:FILES_AT_ONCE])
    server.sendmsg([len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
    server.sendall(data)

    def pass_on(number: int, _: object) -> None:
        try:
            server.send(bytes([number]))
        except OSError:  # the copy has just ended
            pass

    for number in PASSED_ON:
        if number not in ignored:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
    for number in (0, 1):  # whoever reads from or writes to the copy must see its end, not this one's
        os.close(number)
    end = server.recv(4)
    if len(end) < 4:
        return 255
    code = int.from_bytes(end, "big", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    os._exit(main())
