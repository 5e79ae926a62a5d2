"""What the suites measure on: pools with chains of keys in them, and the pieces of an empty call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool import Identity, Keys, Namespace, Pool
from kvpool.bindings import check, core, ffi, lib
from kvpool.tools.bench_suite import SEED

__all__ = [
    "CHAIN", "IDENTITY", "STRIDE_MIN", "TOKENS", "World", "empty_call", "make_pool", "make_world", "random_tokens",
    "raw_pointer",
]  # fmt: skip

CHAIN, TOKENS = 1024, 16
IDENTITY = Identity(model="bench", revision="0", dtype="uint8", layout="bytes", block_tokens=TOKENS)
STRIDE_MIN: int = lib.KVP_STRIDE_MIN


def make_pool(blocks: int, stride: int, workers: int = 4) -> Pool:
    """An anonymous pool through the C call, which allows blocks as small as a cache line."""
    request = ffi.new("struct kvp_request *")
    request.blocks, request.workers, request.classes = blocks, workers, 1
    request.stride = [stride] + [0] * 7
    out = ffi.new("kvp_pool **")
    check(lib.kvp_pool_create(b"memfd:", request, b"leaf", out))
    return Pool(core("coherent"), ffi.gc(out[0], lib.kvp_pool_free))


def empty_call(pool: Pool) -> Callable[[], int]:
    """The least that a call into C costs: one pointer in, one int out."""
    fd, handle = lib.kvp_pool_fd, pool.handle
    return lambda: fd(handle)


def random_tokens(rng: np.random.Generator, blocks: int) -> NDArray[np.uint32]:
    """Tokens for so many blocks."""
    return rng.integers(0, 1 << 16, blocks * TOKENS, dtype=np.uint32)


class World:
    """A pool of tiny blocks, full of chains of 1,024 keys but for a little room; `tokens` of each whole chain."""

    def __init__(self, blocks: int) -> None:
        """Make and fill a pool of so many blocks."""
        self.pool = make_pool(blocks, STRIDE_MIN)
        self.space: Namespace = self.pool.namespace(IDENTITY)
        self._rng = np.random.default_rng(SEED)
        self.tokens: list[NDArray[np.uint32]] = []
        for _ in range((blocks - blocks // 64) // CHAIN):
            self._publish(random_tokens(self._rng, CHAIN))

    def _publish(self, tokens: NDArray[np.uint32]) -> None:
        with self.space.reserve(self.space.keys(tokens)) as blocks:
            if blocks.publish() == CHAIN:  # the directory may have had no room for a key
                self.tokens.append(tokens)

    def new_keys(self, count: int) -> Keys:
        """Keys that nobody has published."""
        return self.space.keys(random_tokens(self._rng, count))

    def any_tokens(self) -> NDArray[np.uint32]:
        """A prompt that is in the pool, as warm as one that was just made."""
        return self.tokens[self._rng.integers(len(self.tokens))].copy()

    def any_keys(self, count: int) -> Keys:
        """The first keys of such a prompt."""
        return self.space.keys(self.any_tokens()[: count * TOKENS])


def make_world(blocks: int) -> World:
    """A world; raises RuntimeError if the pool took no chain as a whole."""
    world = World(blocks)
    if not world.tokens:
        raise RuntimeError(f"no chain of {CHAIN} keys is whole in a pool of {blocks} blocks")
    return world


def raw_pointer(array: NDArray[Any], kind: str) -> Any:
    """The array as a C pointer, made once outside what is timed."""
    return ffi.cast(kind, ffi.from_buffer(array))
