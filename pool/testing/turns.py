"""Threads that take turns: an interleaving that something else chooses, and that is the same the next time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Deadlock", "Turns"]

WAIT_S = 60.0


class Deadlock(RuntimeError):
    """Every thread that is left waits for a lock of another."""


class _Abandoned(BaseException):
    """Ends a thread whose run is over."""


class _Thread:
    """A function in a thread of its own, that runs when it is its turn."""

    def __init__(self, turns: Turns, number: int, function: Callable[[], object]) -> None:
        self.turns, self.function = turns, function
        self.go = threading.Semaphore(0)
        self.ended = self.abandoned = False
        self.failure: BaseException | None = None
        self.waits_for: object = None
        self.thread = threading.Thread(target=self.body, name=f"T{number}", daemon=True)
        self.thread.start()

    def body(self) -> None:
        try:
            self.wait()
            self.turns.local.thread = self
            self.function()
        except _Abandoned:
            pass
        except BaseException as failure:
            self.failure = failure
        self.ended = True
        self.turns.back.release()

    def wait(self) -> None:
        self.go.acquire()
        if self.abandoned:
            raise _Abandoned


class Turns:
    """Runs functions in threads of which one runs at a time. At each `pause` somebody else may go on.

    `choose(n)` answers 0 to n - 1: which of the n threads that could run runs next. It is called in the thread that
    calls `run`, so it may draw from Hypothesis: `Turns(lambda n: data.draw(st.integers(0, n - 1)))` explores
    interleavings, and shrinks one that fails.

    Put `turns.pause` where another thread could come in between: between reading and writing what is shared, around
    slow calls. Outside of `run` it does nothing, so it may stay in code that is used otherwise as well. A thread must
    not wait for another by other means than `lock`; one that does not come back within a minute fails the run. What
    lies between two pauses appears as one step: what a pause does not divide is not tested.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self.back = threading.Semaphore(0)
        self.local = threading.local()
        self.locked: set[object] = set()

    def run(self, *functions: Callable[[], object]) -> None:
        """Run all to their end, in threads named T0, T1 and so on.

        The first exception of one of them is raised, after the others have been given up.
        """
        threads = [_Thread(self, number, function) for number, function in enumerate(functions)]
        try:
            while left := [thread for thread in threads if not thread.ended]:
                able = [thread for thread in left if thread.waits_for not in self.locked]
                if not able:
                    raise Deadlock(f"{len(left)} threads wait for locks of each other")
                thread = able[self.choose(len(able))]
                thread.go.release()
                if not self.back.acquire(timeout=WAIT_S):
                    raise TimeoutError("a thread neither paused nor ended: it must wait by pause() and lock() only")
                if thread.failure is not None:
                    raise thread.failure
        finally:
            for thread in threads:
                thread.abandoned = True
                thread.go.release()
            self.locked.clear()

    def pause(self) -> None:
        """Another thread may run here."""
        thread: _Thread | None = getattr(self.local, "thread", None)
        if thread is not None and not thread.abandoned:
            self.back.release()
            thread.wait()

    @contextlib.contextmanager
    def lock(self, name: Any = None) -> Iterator[None]:
        """A lock by name, for the threads of `run` only: who waits for it is not chosen. Not recursive."""
        thread: _Thread | None = getattr(self.local, "thread", None)
        if thread is None:
            raise RuntimeError("Turns.lock() is for the threads of run(): elsewhere use a threading.Lock")
        thread.waits_for = (name,)
        self.pause()
        thread.waits_for = None
        self.locked.add((name,))
        try:
            yield
        finally:
            self.locked.discard((name,))
