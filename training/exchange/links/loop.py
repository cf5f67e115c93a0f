"""Moves the bytes of several links in one thread, which is the caller's own while that has nothing else to do."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

READABLE, WRITABLE = select.POLLIN, select.POLLOUT
ANYTHING, NOTHING = 0, -1
"""What a job waits for: its connection, a change elsewhere, or only that the other links have had their turn."""

Job = Callable[[Any], "Iterator[int] | None"]
"""Work on a link, which is its argument; a generator yields what it waits for."""
E = TypeVar("E", bound=Exception)
_LONGEST_PAUSE = 3600.0
"""Seconds that one look at the connections may take where nothing comes."""


class Loop:
    """Runs the jobs of its links, all in one thread at a time.

    That is a thread of its own, or the one of a caller that would only wait for it otherwise: handing bytes over
    between threads costs more than transferring them, and far more where other programs want the processors.

    Args:
        name: of its thread.
    """

    def __init__(self, name: str) -> None:
        self._links: list[JobQueue[Any]] = []
        self._turn = threading.Lock()
        self._driver = 0
        """Identity of the thread that drives the links."""
        self._work = threading.Event()
        self._woken = self._polls = False
        self._unseen = False
        """Whether there are jobs that no thread was told of."""
        self._waiting: dict[int, JobQueue[Any]] = {}
        """Links that wait for their connection, by its number."""
        self._poll = select.poll()
        self._waker, self._alarm = socket.socketpair()
        for end in (self._waker, self._alarm):
            end.setblocking(False)
        self._poll.register(self._alarm, READABLE)
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def add(self, link: JobQueue[Any]) -> None:
        self._links.append(link)

    @property
    def is_driven_here(self) -> bool:
        """Whether the calling thread drives the links at this moment."""
        return self._driver == threading.get_ident()

    def expect_driver(self) -> None:
        """Note new jobs whose submitter drives the links next."""
        self._unseen = True

    def start(self) -> None:
        """Have new jobs begun, by whichever thread drives the links."""
        if not self.is_driven_here:
            self._work.set()
            self.wake()

    def wake(self) -> None:
        """Have whoever drives the links look for changes."""
        self._woken = True
        if self._polls:
            with contextlib.suppress(OSError):  # enough bytes wait there, or the loop has ended
                self._waker.send(b"\0")

    def drive(self, until: Callable[[], bool], seconds: float) -> None:
        """Drive the links in this thread, unless another one does: until ``until()``, for up to ``seconds``, or until
        there is nothing more to do."""
        if not self._turn.acquire(blocking=False):
            return self.start() if self._unseen else None
        deadline = time.monotonic() + seconds
        try:
            self._driver = threading.get_ident()
            while not until() and self._is_busy() and (left := deadline - time.monotonic()) > 0:
                self._go_round(left)
        finally:
            self._driver = 0
            self._turn.release()
            if self._is_busy():
                self._work.set()

    def cut(self) -> None:
        """End the connections of all links."""
        for link in self._links:
            link.cut()

    @contextlib.contextmanager
    def stopped(self, seconds: float) -> Iterator[None]:
        """Keep every thread from driving the links, if within ``seconds`` none does any more."""
        held = not self.is_driven_here and self._turn.acquire(timeout=seconds)
        try:
            yield
        finally:
            if held:
                self._turn.release()

    def _is_busy(self) -> bool:
        return not all(link.idle for link in self._links)

    def _serve(self) -> None:
        while not (self._links and all(link.is_over for link in self._links)):
            self._work.wait()
            self._work.clear()
            with self._turn:
                self._driver = threading.get_ident()
                while self._is_busy():
                    self._go_round(_LONGEST_PAUSE)
                self._driver = 0
        with self._turn:  # whoever drove it last may still look at these
            self._waker.close()
            self._alarm.close()

    def _go_round(self, seconds: float) -> None:
        """Let every link go on; if none can, wait for that, up to ``seconds``."""
        changed = self._woken = self._unseen = False
        for link in self._links:
            if link.awaits <= 0:
                changed |= link.advance()
            if link.awaits > 0:
                self._watch(link)
        self._polls = True
        pause = 0.0 if changed or self._woken else min(seconds, _LONGEST_PAUSE)
        events = self._poll.poll(1000.0 * pause)
        self._polls = False
        for number, _ in events:
            if number == self._alarm.fileno():
                self._alarm.recv(1 << 10)
            else:
                link = self._waiting.pop(number)
                self._poll.unregister(number)
                link.awaits = NOTHING

    def _watch(self, link: JobQueue[Any]) -> None:
        number = link.fileno()
        if number < 0:  # closed meanwhile: its job fails as it goes on
            link.awaits = NOTHING
        elif self._waiting.get(number) is not link:
            self._poll.register(number, link.awaits)
            self._waiting[number] = link


class JobQueue(ABC, Generic[E]):
    """The jobs of one link, which run one after another on its loop.

    Args:
        loop: of several links, driven by one thread at a time.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.awaits = NOTHING
        """What its job waits for."""
        self._jobs: deque[tuple[Job, Callable[[E | None], None]]] = deque()
        self._steps: Iterator[int] | None = None
        """The rest of the current job."""
        self._done: Callable[[E | None], None] = lambda error: None
        self._pending = 0
        self._closed = False
        self._changed = threading.Condition()

    @abstractmethod
    def fileno(self) -> int:
        """Return the number of its connection; -1: there is none."""

    @abstractmethod
    def cut(self) -> None:
        """End its connection; jobs in progress fail."""

    @abstractmethod
    def _prepare(self) -> None:
        """Called before each job; an exception is the job's."""

    @abstractmethod
    def _failed(self, problem: BaseException) -> E:
        """Handle the failure of a job; return its error."""

    @property
    def idle(self) -> bool:
        return not self._pending

    @property
    def is_over(self) -> bool:
        """Whether it has no job, and will have none."""
        return self._closed and not self._pending

    def submit(self, job: Job, done: Callable[[E | None], None], start: bool = True) -> None:
        """Run ``job`` after those submitted before; ``done`` is called at its end.

        Args:
            start: ``False``: the caller starts or drives the loop afterwards.
        """
        with self._changed:
            closed = self._closed
            if not closed:
                self._pending += 1
                self._jobs.append((job, done))
        if closed:
            return done(self._refused())
        self.loop.start() if start else self.loop.expect_driver()

    @abstractmethod
    def _refused(self) -> E:
        """Return the error of a job that comes after the end."""

    def drain(self, seconds: float) -> None:
        """Take no more jobs, and let the submitted ones end within ``seconds``."""
        with self._changed:
            self._closed = True
        self.loop.start()
        if not self.loop.is_driven_here:
            with self._changed:
                self._changed.wait_for(lambda: not self._pending, seconds)

    def advance(self) -> bool:
        """Run the current job as far as it can go without waiting; return whether that changed anything."""
        if self._steps is None and not self._take_job():
            return False
        assert self._steps is not None
        before, error = self.awaits, None
        try:
            self.awaits = next(self._steps)
            return not before == self.awaits == ANYTHING
        except StopIteration:
            pass
        except Exception as problem:  # noqa: BLE001 - a loop that ends silently would hang the run
            error = self._failed(problem)
        except BaseException as problem:  # Ctrl-C in the middle of a frame
            self._end_job(self._failed(problem))
            raise
        self._end_job(error)
        return True

    def _take_job(self) -> bool:
        if not self._jobs:
            return False
        job, self._done = self._jobs.popleft()
        self._steps = self._run(job)
        return True

    def _run(self, job: Job) -> Iterator[int]:
        self._prepare()
        steps = job(self)
        del job  # it holds buffers that may be reused once `done` is called
        if steps is not None:
            yield from steps

    def _end_job(self, error: E | None) -> None:
        done, self._done, self._steps, self.awaits = self._done, lambda error: None, None, NOTHING
        with self._changed:
            self._pending -= 1
            if self._closed:
                self._changed.notify_all()
        done(error)
