"""A worker that does one operation after another, here or in a process of its own: what a state machine drives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool.testing.child import Here

__all__ = ["VERBS", "Actor", "Operation", "payload_of", "serve"]

VERBS = ("publish", "match", "release", "get_into", "remove", "evict", "give")
_IDENTITY = kvpool.Identity(model="kvpool.testing", revision="1", dtype="uint8", layout="plain", block_tokens=1)


class Operation(NamedTuple):
    """One call on one host: `tokens` for keys, `blocks` to evict (or segments to give), and `to` whom they go."""

    host: int
    verb: str
    tokens: tuple[int, ...] = ()
    blocks: int = 0
    to: int = 0


def payload_of(key: bytes, size: int) -> NDArray[np.uint8]:
    """The bytes that belong to a key: where all payloads are made so, wrong ones show wherever they are read."""
    return np.frombuffer(hashlib.shake_128(bytes(key)).digest(size), np.uint8)


class Actor:
    """Does operations on a pool, with one token per block. What it matched stays pinned until the next release.

    Belongs to one thread. Answers are what JSON can say: a number, or for match and get_into one state per key, from
    the first: None (a miss), True (the right bytes) or False (wrong ones).
    """

    def __init__(self, pool: kvpool.Pool) -> None:
        self.pool = pool
        self.size = pool.block_bytes[0]
        self.ns = pool.namespace(_IDENTITY)
        self.hits: list[tuple[kvpool.Keys, kvpool.Hit]] = []

    def do(self, operation: Operation) -> Any:
        """Do it. "full" where no block, pin slot or segment was to be had, which is always allowed."""
        verb: Callable[[Operation], Any] = getattr(self, f"_{operation.verb}")
        try:
            return verb(operation)
        except (kvpool.PoolFull, kvpool.NoPins):
            return "full"

    def _publish(self, operation: Operation) -> int:
        keys = self.ns.keys(operation.tokens)
        return self.ns.put(keys, [payload_of(key, self.size) for key in keys], timeout=0)

    def _is_right(self, keys: kvpool.Keys, rows: Any) -> list[bool]:
        return [bool(np.array_equal(row, payload_of(key, self.size))) for key, row in zip(keys, rows, strict=False)]

    def _match(self, operation: Operation) -> list[bool | None]:
        keys = self.ns.keys(operation.tokens)
        hit = self.ns.match(keys)
        self.hits.append((keys, hit))
        return [*self._is_right(keys, hit.views), *[None] * (len(keys) - len(hit))]

    def _release(self, operation: Operation) -> list[bool]:
        """What is pinned has still the right bytes, just before it is released."""
        right = [each for keys, hit in self.hits for each in self._is_right(keys, hit.views)]
        for _, hit in self.hits:
            hit.release()
        self.hits.clear()
        return right

    def _get_into(self, operation: Operation) -> list[bool | None]:
        keys = self.ns.keys(operation.tokens)
        rows = np.zeros((len(keys), self.size), np.uint8)
        got = self.ns.get_into(keys, rows)
        right = self._is_right(keys, rows)
        return [right[i] if got[i] else None for i in range(len(keys))]

    def _remove(self, operation: Operation) -> int:
        return self.ns.remove(self.ns.keys(operation.tokens))

    def _evict(self, operation: Operation) -> int:
        return self.pool.evict(operation.blocks)

    def _give(self, operation: Operation) -> int:
        return self.pool.give(operation.to, operation.blocks) if operation.to != self.pool.host else 0


def serve(here: Here) -> None:
    """The function of a child process: operations come in, answers go out, one JSON line each."""
    actor = Actor(here.pool)
    while True:
        host, verb, tokens, blocks, to = json.loads(here.hear())
        here.say(json.dumps(actor.do(Operation(host, verb, tuple(tokens), blocks, to))))
