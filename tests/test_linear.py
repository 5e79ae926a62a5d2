"""What four processes see of one pool, one of them killed, can be explained by one thing happening after the other."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import linear_worker
import pytest
from linear_worker import CHAINS, LENGTH, WORKERS

from kvpool.testing import History, PoolModel, linearizable

SEED = int(os.environ.get("KVPOOL_SEED", random.randrange(1 << 32)))
CALLS, VICTIM = 250, 0


@pytest.fixture
def start(make_pool, tmp_path):
    """Start the workers on a pool; none is left at the end of the test."""
    started = []

    def run(pool, evicts):
        for number in range(WORKERS):
            # The victim would work for ever: it is killed at a moment that nobody chose.
            calls = 1 << 30 if number == VICTIM else CALLS
            words = [Path(linear_worker.__file__), pool.uri, tmp_path, number, SEED, calls, evicts]
            started.append(
                subprocess.Popen(
                    [sys.executable, "-P", *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        for worker in started:
            assert worker.stdout.readline() == "ready\n"
        for worker in started:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return started

    yield run
    for worker in started:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize("blocks", [64, 10], ids=["room for all", "evicting"])
def test_histories_of_processes(make_pool, start, tmp_path, blocks):
    print(f"KVPOOL_SEED={SEED}")
    evicts = blocks < (WORKERS + CHAINS) * LENGTH  # all keys published, and each worker with a chain reserved
    workers = start(make_pool(blocks=blocks, workers=8), "evicts" if evicts else "")
    history = History(tmp_path)
    deadline = time.monotonic() + 60
    while sum(operation.worker == f"w{VICTIM}" for operation in history.operations()) < 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers[VICTIM].kill()
    for number, worker in enumerate(workers):
        assert worker.wait(120) == (-signal.SIGKILL if number == VICTIM else 0)
    verdict = linearizable(history, PoolModel(evicts=evicts))
    print(verdict)
    assert verdict.ok, f"KVPOOL_SEED={SEED}\n{verdict}"
    assert verdict.operations > WORKERS * CALLS
    assert verdict.keys == CHAINS * LENGTH
