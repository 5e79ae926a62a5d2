"""`kvpool bench engines`: time to the first token of a prompt whose prefix is known, in real engines, by each way.

Ways take turns on the same prompts, each prompt by each way, in an order that rotates; what is printed is medians.
Every way must say the same token. The bound is vLLM's own prefix cache: a hit in the engine's memory. LMCache's server
has what it knows in shared memory of its own: no pool is involved.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kvpool
from kvpool.tools.bench_suite import Effort, Report, Row
from kvpool.tools.lmcache_server import lmcache_server

__all__ = ["run"]

BLOCK_TOKENS = 128
LENGTHS = (2064, 4112)  # of which all but the last 16 tokens are in the pool
FLOOR = "vLLM's own prefix cache"
SERVER_GB = 2.0
WARM, FLUSH = 10_000, 20_000  # seeds of prompts that nobody measures
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
    """The engines of one run, all alive; what they find, other engines have computed."""

    def __init__(self, folder: Path, uri: str, prompts: int) -> None:
        self._folder, self._uri, self._prompts = folder, uri, prompts
        self._blocks = 1 + 2 * prompts * (max(LENGTHS) // BLOCK_TOKENS + 1)
        self._ends = contextlib.ExitStack()
        self.tokens: dict[int, int] = {}

    def _child(self, name: str) -> Child:
        child = Child(self._folder / f"{name}.log")
        self._ends.callback(child.close)
        return child

    def start(self, name: str, transfer: dict[str, Any] | None) -> Child:
        """An engine, with a connector if `transfer` has the fields of its configuration."""
        child = self._child(name)
        child.ask("engine", model=str(self._folder / "model"), blocks=self._blocks, transfer=transfer)
        return child

    def connector(self, **extra: Any) -> dict[str, Any]:
        """Ours, with these options."""
        return {
            "kv_connector": "KVPoolConnector",
            "kv_connector_module_path": "kvpool.bindings.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"uri": self._uri, **extra},
        }

    def save_model(self) -> None:
        """What all engines run."""
        maker = self._child("model")
        maker.ask("model", folder=str(self._folder / "model"))
        maker.close()

    def fill(self, name: str, transfer: dict[str, Any]) -> None:
        """Have an engine compute and store every prompt. Raises `RuntimeError` if it says other tokens than others."""
        writer = self.start(name, transfer)
        for seed in range(self._prompts):
            token = writer.ask("ask", seed=seed, length=max(LENGTHS))["token"]
            self._demand(seed, token)
        writer.ask("ask", seed=FLUSH, length=BLOCK_TOKENS)  # steps in which the last stores end
        writer.close()

    def _demand(self, seed: int, token: int) -> None:
        if self.tokens.setdefault(seed, token) != token:
            raise RuntimeError(f"prompt {seed}: token {token}, not {self.tokens[seed]}")

    def lmcache(self) -> dict[str, Any]:
        """LMCache's server, until the end; how to reach it."""
        return self._ends.enter_context(lmcache_server(self._folder / "server.log", BLOCK_TOKENS, SERVER_GB))

    def sample(self, child: Child, seed: int, length: int, cached: int) -> float:
        """Milliseconds to the first token. Raises `RuntimeError` unless it is the right one, by the right way."""
        got = child.ask("ask", seed=seed, length=length)
        if got["cached"] != cached:
            raise RuntimeError(f"prompt {seed}: {got['cached']} tokens were cached, not {cached}")
        if length == max(LENGTHS):
            self._demand(seed, got["token"])
        return float(got["seconds"]) * 1e3

    def close(self) -> None:
        """End all."""
        self._ends.close()


def _ways(race: Race) -> dict[str, Child]:
    """An engine for each way, and all that these find is there."""
    race.save_model()
    race.fill("writer", race.connector(mode="in-place", size=1))
    ways = {
        "connector, copying": race.start("copying", race.connector()),
        "connector, in place": race.start("in-place", race.connector(mode="in-place")),
        "recompute": race.start("plain", None),
    }
    if _has("lmcache"):
        transfer = race.lmcache()
        race.fill("lmcache-writer", transfer)
        ways["LMCache"] = race.start("lmcache", transfer)
    for child in ways.values():
        child.ask("ask", seed=WARM, length=1040)
    return ways


def _measure(race: Race, prompts: int, lengths: tuple[int, ...]) -> dict[tuple[str, int], list[float]]:
    """Samples by way and length."""
    ways = _ways(race)
    taken: dict[tuple[str, int], list[float]] = {}
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


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _about(prompts: int) -> dict[str, str]:
    about = {
        "engine": f"vLLM {importlib.import_module('vllm').__version__}, one thread each, all alive at once",
        "model": "8 layers, 8 KV heads of 64, bfloat16: 16 KiB a token, 2 MiB a block of 128",
        "samples": f"{prompts} prompts",
    }
    if _has("lmcache"):
        about["LMCache"] = f"{importlib.metadata.version('lmcache')}, from the memory of its server"
    return about


def run(effort: Effort) -> Report:
    """The suite. What is not installed it names."""
    if not _has("vllm"):
        return Report(
            notes=["all of it: vLLM is not installed here; `make test-engines` makes build/engines, where it is"]
        )
    prompts = 3 if effort.quick else 9
    uri = f"shm:bench-engines-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        race = Race(Path(folder), uri, prompts)
        try:
            rows = _rows(_measure(race, prompts, LENGTHS[:1] if effort.quick else LENGTHS))
        finally:
            race.close()
            with contextlib.suppress(kvpool.NotFound):
                kvpool.remove(uri, force=True)
    return Report(rows, [] if _has("lmcache") else ["LMCache: it is not installed here"], _about(prompts))
