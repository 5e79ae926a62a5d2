"""`kvpool bench engines`: time to the first token of a prompt whose prefix is known, in real engines, by each way.

Ways take turns on the same prompts, each prompt by each way, in an order that rotates; what is printed is medians.
Every
way must say the same token. The bound is vLLM's own prefix cache: a hit in the engine's memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpool
from kvpool.tools.bench_suite import Effort, Report, Row

__all__ = ["run"]

BLOCK_TOKENS = 128
LENGTHS = (2064, 4112)  # of which all but the last 16 tokens are in the pool
FLOOR = "vLLM's own prefix cache"
CHILD = "kvpool.tools.bench_engines_child"


class Child:
    """A process with one engine."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        )
        self._path = log

    def ask(self, verb: str, **values: Any) -> dict[str, Any]:
        """One order and its answer. Raises `RuntimeError` if the child has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, **values}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@@"):
                answer: dict[str, Any] = json.loads(line[2:])
                return answer
        raise RuntimeError(f"an engine has ended: {self._path.read_text()[-2000:]}")

    def close(self) -> None:
        """End it; idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Race:
    """The engines of one run, all alive, on one pool that another engine has filled."""

    def __init__(self, folder: Path, uri: str, prompts: int) -> None:
        self._folder, self._uri, self._prompts = folder, uri, prompts
        self._blocks = 1 + 2 * prompts * (max(LENGTHS) // BLOCK_TOKENS + 1)
        self._children: list[Child] = []
        self.tokens: dict[int, int] = {}

    def start(self, name: str, extra: dict[str, Any] | None) -> Child:
        """An engine; `extra`: with the connector and these options."""
        child = Child(self._folder / f"{name}.log")
        self._children.append(child)
        options = None if extra is None else {"uri": self._uri, **extra}
        child.ask("engine", model=str(self._folder / "model"), blocks=self._blocks, extra=options)
        return child

    def fill(self) -> None:
        """Compute every prompt into the pool."""
        maker = Child(self._folder / "model.log")
        self._children.append(maker)
        maker.ask("model", folder=str(self._folder / "model"))
        maker.close()
        writer = self.start("writer", {"mode": "in-place", "size": 1})
        for seed in range(self._prompts):
            self.tokens[seed] = writer.ask("ask", seed=seed, length=max(LENGTHS))["token"]
        writer.close()

    def sample(self, child: Child, seed: int, length: int, cached: int) -> float:
        """Milliseconds to the first token. Raises `RuntimeError` unless it is the right one, by the right way."""
        got = child.ask("ask", seed=seed, length=length)
        if got["cached"] != cached:
            raise RuntimeError(f"{got['cached']} tokens were cached, not {cached}: see {self._folder}")
        if length == max(LENGTHS) and got["token"] != self.tokens[seed]:
            raise RuntimeError(f"prompt {seed}: token {got['token']}, not {self.tokens[seed]}")
        return float(got["seconds"]) * 1e3

    def close(self) -> None:
        """End all."""
        for child in self._children:
            child.close()


def _measure(race: Race, prompts: int, lengths: tuple[int, ...]) -> dict[tuple[str, int], list[float]]:
    """Samples by way and length."""
    ways = {
        "connector, copying": race.start("copying", {}),
        "connector, in place": race.start("in-place", {"mode": "in-place"}),
        "recompute": race.start("plain", None),
    }
    taken: dict[tuple[str, int], list[float]] = {}
    for child in ways.values():
        child.ask("ask", seed=10_000, length=1040)  # warm
    for length in sorted(lengths, reverse=True):
        hit = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for seed in range(prompts):
            order = list(ways.items())
            order = order[seed % len(order) :] + order[: seed % len(order)]
            for name, child in order:
                cached = 0 if name == "recompute" else hit
                taken.setdefault((name, length), []).append(race.sample(child, seed, length, cached))
            taken.setdefault((FLOOR, length), []).append(race.sample(ways["recompute"], seed, length, hit))
        for child in ways.values():
            child.ask("reset")
    return taken


def _rows(taken: dict[tuple[str, int], list[float]]) -> list[Row]:
    rows = []
    for (name, length), samples in sorted(taken.items(), key=lambda each: (each[0][1], statistics.median(each[1]))):
        floor = statistics.median(taken[FLOOR, length])
        hit = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        rows.append(Row.of(f"TTFT, {hit} of {length} tokens: {name}", "ms", statistics.median(samples), floor))
    return rows


def _in_engines(work: Callable[[Race], Report], prompts: int) -> Report:
    uri = f"shm:bench-engines-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        race = Race(Path(folder), uri, prompts)
        try:
            race.fill()
            return work(race)
        finally:
            race.close()
            with contextlib.suppress(kvpool.NotFound):
                kvpool.remove(uri, force=True)


def run(effort: Effort) -> Report:
    """The suite. Where vLLM is not installed it says so."""
    if importlib.util.find_spec("vllm") is None:
        return Report(
            notes=["all of it: vLLM is not installed here; `make test-engines` makes build/engines, where it is"]
        )
    prompts = 3 if effort.quick else 9
    lengths = LENGTHS[:1] if effort.quick else LENGTHS

    def work(race: Race) -> Report:
        import vllm

        about = {
            "engine": f"vLLM {vllm.__version__}, one thread each, all alive at once",
            "model": "8 layers, 8 KV heads of 64, bfloat16: 16 KiB a token, 2 MiB a block of 128",
            "samples": f"{prompts} prompts",
        }
        return Report(_rows(_measure(race, prompts, lengths)), about=about)

    return _in_engines(work, prompts)
