"""The processes of the demo: one prefills shared contexts, others decode requests, all over one pool.

Each function is the life of a process: it opens the pool, says "ready", and answers messages on a pipe until None
comes.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import kvpool
from kvpool.tools.model import Config, Model, Sequence, usable_prefix

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Answer", "Request", "decode", "identity", "prefill"]

DTYPE = np.float32
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Request:
    """One prompt. `wait_at_token`: stop for good after that many tokens, for the parent to kill the process there."""

    number: int
    ids: list[int]
    new_tokens: int
    wait_at_token: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a request; times in milliseconds, token counts of the prompt."""

    number: int
    tokens: int
    matched: int
    ttft_ms: float
    ttft_ms_without: float
    equal: bool
    bytes_copied: int
    bytes_published: int
    margin_min: float
    output: list[int]


def identity(model: Model) -> kvpool.Identity:
    """Everything that the numbers in a block depend on."""
    return kvpool.Identity(
        model="SmolLM2-135M-Instruct",
        revision=model.sha256,
        dtype=np.dtype(DTYPE).name,
        layout=f"L2HNC/{BLOCK_TOKENS}, K after RoPE",
        isa="numpy float32",
        block_tokens=BLOCK_TOKENS,
    )


def read_only(views: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """The views themselves: hits are read-only already; asserted because attention must never write a block."""
    assert not any(view.flags.writeable for view in views)
    return views


def publish(ns: kvpool.Namespace, keys: kvpool.Keys, seq: Sequence, shape: tuple[int, ...]) -> int:
    """Write the whole blocks of a sequence's tail into reserved blocks and make them visible at once."""
    with ns.reserve(keys) as new:
        for i, view in enumerate(new.views_as(DTYPE, shape)):
            seq.write_block(view, i)
        return new.publish()


def prefill(pipe: Connection, uri: str, weights: Path, host: int | None = None) -> None:
    """Compute each context that comes and publish its blocks."""
    model, pool = Model.load(weights), kvpool.open(uri, host=host)
    ns, config = pool.namespace(identity(model)), model.config
    pipe.send("ready")
    for ids in iter(pipe.recv, None):
        keys = ns.keys(ids)
        seq = Sequence(config, dtype=DTYPE)
        model.forward(ids[: len(keys) * BLOCK_TOKENS], seq)
        pipe.send(publish(ns, keys, seq, config.block_shape()))
    pool.close()


def timed(
    model: Model, seq: Sequence, request: Request, start: int, begun: float
) -> tuple[float, list[int], list[float]]:
    """Time to first token in milliseconds since `begun`, the tokens and their margins."""
    first: list[float] = []

    def note(token: int) -> None:
        first.append((time.perf_counter() - begun) * 1e3)
        if len(first) == request.wait_at_token:
            time.sleep(3600)

    tokens, margins = model.greedy(seq, request.ids[start:], request.new_tokens, note)
    return first[0], tokens, margins


def with_pool(
    model: Model, config: Config, ns: kvpool.Namespace, request: Request
) -> tuple[float, list[int], list[float], int, Sequence]:
    """Answer with what the pool has: attend to its blocks in place, compute the rest, publish it."""
    begun = time.perf_counter()
    with ns.match(ns.keys(request.ids)) as hit:
        used = usable_prefix(len(request.ids), len(hit))
        views = read_only(hit.views_as(DTYPE, config.block_shape())[:used])
        seq = Sequence(config, views, dtype=DTYPE)
        ttft, tokens, margins = timed(model, seq, request, used * BLOCK_TOKENS, begun)
        known = request.ids + tokens[:-1]  # the last token's own K and V are not computed
        publish(ns, ns.keys(known)[used:], seq, config.block_shape())
    return ttft, tokens, margins, used, seq


def without_pool(model: Model, config: Config, request: Request) -> tuple[float, list[int]]:
    """The same request from nothing."""
    plain = Request(request.number, request.ids, request.new_tokens)
    ttft, tokens, _ = timed(model, Sequence(config, dtype=DTYPE), plain, 0, time.perf_counter())
    return ttft, tokens


def last_look(pool: kvpool.Pool) -> dict[str, Any]:
    """What the pool looks like from this host, and whether two hosts have ever written one line."""
    report = pool.check()
    return {
        "host": pool.host, "clean": report.clean, "problems": report.problems, "leaked": report.leaked,
        "conflicts": pool.line_counts()["conflicts"], "lines_written": pool.line_counts()["lines_written"],
    }  # fmt: skip


def decode(pipe: Connection, uri: str, weights: Path, host: int | None = None) -> None:
    """Answer each request that comes twice, with the pool and without it, and compare.

    One of several hosts looks at the end whether the pool is whole as that host sees it.
    """
    model, pool = Model.load(weights), kvpool.open(uri, host=host)
    ns, config = pool.namespace(identity(model)), model.config
    model.forward([0], Sequence(config, dtype=DTYPE))  # pages of the weights are read once before anything is timed
    pipe.send("ready")
    for request in iter(pipe.recv, None):
        if request.wait_at_token is not None:
            pipe.send(("begun", request.number))
        ttft, tokens, margins, used, seq = with_pool(model, config, ns, request)
        ttft_without, expected = without_pool(model, config, request)
        answer = Answer(
            request.number,
            len(request.ids),
            used * BLOCK_TOKENS,
            ttft,
            ttft_without,
            tokens == expected,
            seq.bytes_copied,
            seq.bytes_published,
            min(margins),
            tokens,
        )
        pipe.send(("answer", asdict(answer)))
    if host is not None:
        pipe.send(("found", last_look(pool)))
    pool.close()
