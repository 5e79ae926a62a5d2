"""A peer of the pool as a child of `kvpool bench peers`: for each line in, one sample out, as a line with @@ before it.

python bench_peers_child.py PEER VERB NUMBER [WHERE]

Runs in the interpreter that has the peer's packages, which need not have kvpool, and so imports nothing of it. VERB is
`put` or `get`, of NUMBER bytes, or `lookup` of 1,024 keys among NUMBER. Buffers take turns as in the suite `copy`.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["main"]

CHAIN = 1024
COLD_BYTES = 96 << 20
Sample = Callable[[], float]


def microseconds(call: Callable[[], Any]) -> float:
    """Of one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


class Buffers:
    """Memory of the caller, so much that each piece is cold when its turn comes."""

    def __init__(self, size: int) -> None:
        """Pieces of so many bytes."""
        self.size, self.count = size, COLD_BYTES // size
        self.pieces = [bytearray(b"\7") * size for _ in range(self.count)]
        self.addresses = [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in self.pieces]
        self._turn = itertools.count()

    def next(self) -> int:
        """Whose turn it is."""
        return next(self._turn) % self.count


# ---- iceoryx2: publish and subscribe, no keys ----


def iceoryx2(verb: str, size: int, _where: str) -> Sample:
    """A slice loaned, filled, sent; or received and copied out. Both ends are in this process."""
    iox: Any = importlib.import_module("iceoryx2")
    iox.set_log_level(iox.LogLevel.Error)
    node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
    name = iox.ServiceName.new(f"kvpool-bench-{os.getpid()}")
    service = node.service_builder(name).publish_subscribe(iox.Slice[ctypes.c_uint8]).open_or_create()
    publisher = service.publisher_builder().initial_max_slice_len(size).create()
    subscriber = service.subscriber_builder().create()
    buffers = Buffers(size)

    def put(address: int) -> None:
        slot = publisher.loan_slice_uninit(size)
        ctypes.memmove(slot.payload_ptr, address, size)
        slot.assume_init().send()

    def get(address: int) -> None:
        slot = subscriber.receive()
        ctypes.memmove(address, slot.payload_ptr, size)
        slot.delete()

    def sample() -> float:
        source, target = buffers.addresses[buffers.next()], buffers.addresses[buffers.next()]
        spent = {"put": microseconds(lambda: put(source)), "get": microseconds(lambda: get(target))}
        return spent[verb]

    return sample


# ---- redis: a server, through its Python client ----


def redis(verb: str, number: int, where: str) -> Sample:
    """SET, GET or a pipeline of EXISTS over a unix socket."""
    client = importlib.import_module("redis").Redis(unix_socket_path=where)
    if verb == "lookup":
        keys = [index.to_bytes(16, "big") for index in range(number)]
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.set(key, b"")
        pipeline.execute()

        def lookup() -> float:
            at = random.randrange(number // CHAIN) * CHAIN
            for key in keys[at : at + CHAIN]:
                pipeline.exists(key)
            return microseconds(pipeline.execute)

        return lookup
    buffers = Buffers(number)
    for turn in range(buffers.count):
        client.set(str(turn), buffers.pieces[turn])

    def sample() -> float:
        turn = buffers.next()
        if verb == "put":
            return microseconds(lambda: client.set(str(turn), buffers.pieces[turn]))
        return microseconds(lambda: client.get(str(turn)))

    return sample


# ---- indexes ----


def dynamo(_verb: str, number: int, _where: str) -> Sample:
    """The radix tree of Dynamo's router, in this process."""
    tree = importlib.import_module("dynamo._core").RadixTree()
    for event, first in enumerate(range(1, number - CHAIN + 2, CHAIN)):
        blocks = [{"block_hash": key, "tokens_hash": key} for key in range(first, first + CHAIN)]
        stored = {"stored": {"parent_hash": None, "blocks": blocks}}
        tree.apply_event(0, json.dumps({"event_id": event, "data": stored, "dp_rank": 0}).encode())

    def sample() -> float:
        first = random.randrange(number // CHAIN) * CHAIN + 1
        chain = list(range(first, first + CHAIN))
        return microseconds(lambda: tree.find_matches(chain))

    return sample


def vllm(_verb: str, number: int, _where: str) -> Sample:
    """The table of vLLM's BlockPool, asked key by key as its manager does."""
    pools: Any = importlib.import_module("vllm.v1.core.block_pool")
    hashing: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    pool = pools.BlockPool(number + 1, True, 16)
    names = [random.randbytes(32) for _ in range(number)]
    for block, name in zip(pool.get_new_blocks(number), names, strict=True):
        block.set_block_hash(hashing.make_block_hash_with_group_id(name, 0), 16)
        pool.cached_block_hash_to_block.insert(block.block_hash, block)

    def sample() -> float:
        at = random.randrange(number // CHAIN) * CHAIN
        chain = names[at : at + CHAIN]
        return microseconds(lambda: [pool.get_cached_block(name, [0]) for name in chain])

    return sample


# ---- LMCache: its first level, in this process ----


def lmcache(verb: str, number: int, _where: str) -> Sample:
    """Keys reserved and finished, for writing or for reading, with a copy between if bytes are asked for."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    api: Any = importlib.import_module("lmcache.v1.distributed.api")
    config: Any = importlib.import_module("lmcache.v1.distributed.config")
    managers: Any = importlib.import_module("lmcache.v1.distributed.l1_manager")
    size, count = (4096, number) if verb == "lookup" else (number, COLD_BYTES // number)
    memory = config.L1MemoryManagerConfig(size_in_bytes=2 * size * count, use_lazy=False, shm_name="")
    manager = managers.L1Manager(config.L1ManagerConfig(memory_config=memory))
    layout = api.MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
    keys = [api.ObjectKey(index.to_bytes(16, "big"), "bench", 0) for index in range(count)]
    sources = [torch.full((size,), 7, dtype=torch.uint8) for _ in range(1 if verb == "lookup" else count)]
    turns = itertools.count()

    def put(turn: int) -> None:
        _, place = manager.reserve_write([keys[turn]], [False], layout)[keys[turn]]
        place.tensor.copy_(sources[turn % len(sources)])
        manager.finish_write([keys[turn]])

    def get(turn: int) -> None:
        _, place = manager.reserve_read([keys[turn]])[keys[turn]]
        sources[turn].copy_(place.tensor)
        manager.finish_read([keys[turn]])

    def sample() -> float:
        if verb == "lookup":
            at = random.randrange(count // CHAIN) * CHAIN
            chain = keys[at : at + CHAIN]
            spent = microseconds(lambda: manager.reserve_read(chain))
            manager.finish_read(chain)
            return spent
        turn = next(turns) % count
        if verb == "put":
            manager.delete([keys[turn]])
        return microseconds(lambda: (put if verb == "put" else get)(turn))

    for turn in range(count):
        put(turn)
    return sample


PEERS: dict[str, Callable[[str, int, str], Sample]] = {
    "iceoryx2": iceoryx2,
    "redis": redis,
    "dynamo": dynamo,
    "vllm": vllm,
    "lmcache": lmcache,
}


def main() -> None:
    """Serve samples until stdin ends."""
    peer, verb, number, *where = sys.argv[1:]
    sample = PEERS[peer](verb, int(number), where[0] if where else "")
    print("@@ready", flush=True)
    for _ in sys.stdin:
        print(f"@@{sample()}", flush=True)


if __name__ == "__main__":
    main()
