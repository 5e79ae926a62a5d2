"""Processes that a command starts for a part of its work, each with a link to it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

__all__ = ["children"]


@contextmanager
def children(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    """One process for each row of arguments, running `work(*row, link)`; the other end of each link, in order.

    None of them outlives the block.
    """
    context = multiprocessing.get_context("spawn")
    started: list[SpawnProcess] = []
    links: list[Connection] = []
    try:
        for row in arguments:
            ours, theirs = context.Pipe()
            links.append(ours)
            process = context.Process(target=work, args=(*row, theirs), daemon=True)
            # A terminal sends Ctrl-C to all of us: the children leave it to this process, which ends them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
                started.append(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        yield links
    finally:
        for process in started:
            process.terminate()
            process.join()
