"""One process of test_linear: calls on a pool, drawn from a seed and recorded per key.

python linear_worker.py URI FOLDER NUMBER SEED CALLS [evicts]

It says "ready" and begins with the first line that it is given.
"""

import contextlib
import random
import sys

import numpy as np

import kvpool
from kvpool.testing import History

IDENTITY = kvpool.Identity(model="linear", revision="1", dtype="uint64", layout="plain/16")
WORKERS, CHAINS, LENGTH = 4, 3, 3
BLOCK = 4096


def bytes_of(tag):
    """A block that says throughout whose publication it is."""
    return np.full(BLOCK // 8, tag, np.uint64).view(np.uint8)


def tag_of(block):
    """Whose publication a block is; bytes of several are no publication at all."""
    words = np.unique(np.asarray(block).view(np.uint64))
    return int(words[0]) if len(words) == 1 else f"bytes of {words.tolist()}"


class Worker:
    """The calls; `draw` says on which keys."""

    def __init__(self, uri, folder, number, seed):
        self.history = History(folder, worker=f"w{number}")
        self.pool = kvpool.open(uri)
        self.ns = self.pool.namespace(IDENTITY)
        self.random = random.Random(f"{seed} {number}")
        self.hit, self.seen = None, []
        self.tags = iter(range(1 + number, 1 << 40, WORKERS))

    def draw(self):
        """A chain, or the beginning of one: keys, and what they are called in the history."""
        chain, length = self.random.randrange(CHAINS), self.random.randint(1, LENGTH)
        return self.ns.keys(np.full(16 * length, chain, np.uint32)), [f"{chain}.{i}" for i in range(length)]

    def publish(self):
        keys, names = self.draw()
        tags = [next(self.tags) for _ in names]
        with self.history.call_many("publish", names, tags) as call:
            try:
                with self.ns.reserve(keys, timeout=0) as new:
                    for view, tag in zip(new.views, tags, strict=True):
                        view[:] = bytes_of(tag)
                    new.publish()
                    call.results[:] = [bool(ref) for ref in new.refs]
            except kvpool.PoolFull:
                call.results[:] = [False] * len(names)

    def match(self):
        """The pins stay until the next match: what is evicted or removed meanwhile must spare these bytes."""
        keys, names = self.draw()
        self.release()
        with self.history.call_many("match", names) as call:
            self.hit = self.ns.match(keys)
            self.seen = [tag_of(view) for view in self.hit.views]
            call.results[: len(self.hit)] = self.seen
            if len(self.hit) < len(names):
                call.results[len(self.hit)] = None  # a miss; what comes after it was not asked

    def release(self):
        if self.hit:
            assert [tag_of(view) for view in self.hit.views] == self.seen, "pinned bytes have changed"
            self.hit.release()

    def get(self):
        keys, names = self.draw()
        out = [np.zeros(BLOCK, np.uint8) for _ in names]
        with self.history.call_many("match", names) as call:
            got = self.ns.get_into(keys, out)
            call.results[:] = [tag_of(block) if found else None for block, found in zip(out, got, strict=True)]

    def remove(self):
        keys, names = self.draw()
        i = self.random.randrange(len(names))
        # Busy: an evictor is stopped, and the block may still be there: the call stays pending.
        with contextlib.suppress(kvpool.Busy), self.history.call("remove", names[i]) as call:
            call.result = bool(self.ns.remove(keys[i : i + 1]))

    def evict(self):
        self.pool.evict(self.random.randint(1, 3))


def main(uri, folder, number, seed, calls, evicts=""):
    worker = Worker(uri, folder, int(number), seed)
    verbs = [worker.publish, worker.match, worker.get, worker.remove, worker.evict]
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(int(calls)):
        worker.random.choices(verbs, (4, 4, 4, 1, 1 if evicts else 0))[0]()
    worker.pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
