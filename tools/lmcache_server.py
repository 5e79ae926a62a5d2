"""LMCache's server as a child process, and how vLLM is told to use it: for `kvpool bench engines` and for tests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["ENVIRONMENT", "lmcache_server"]

ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false"}
START_S, END_S = 180.0, 30.0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _command(port: int, web: int, chunk_tokens: int, gigabytes: float, pool: dict[str, Any] | None) -> list[str]:
    options = {
        "host": "127.0.0.1",
        "port": port,
        "http-host": "127.0.0.1",
        "http-port": web,
        "chunk-size": chunk_tokens,
        "l1-size-gb": gigabytes,
        "eviction-policy": "LRU",
        "max-workers": 2,
        "hash-algorithm": "sha256_cbor",
        "supported-transfer-mode": "engine_driven",  # the one that CPUs have
        "shm-name": f"kvpool{port}",  # or it sends the bytes through a socket
    }
    if pool is not None:
        client = {"module_path": "kvpool.bindings.lmcache", "class_name": "PoolClient", "adapter_params": pool}
        options["l2-adapter"] = json.dumps({"type": "native_plugin", **client})
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-P", "-m", "lmcache.cli.main", "server", *words, "--disable-metrics"]


def _answers(web: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{web}/", timeout=1):
            return True
    except urllib.error.HTTPError:
        return True  # that it has no such page is an answer
    except OSError:
        return False


def _wait(process: subprocess.Popen[bytes], web: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _answers(web):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"LMCache's server does not answer: {log.read_text()[-4000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def lmcache_server(
    log: Path, chunk_tokens: int, gigabytes: float, pool: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """A server with so much memory of its own and, if `pool` has the parameters of `PoolClient`, that as second level.

    Yields the fields of vLLM's `KVTransferConfig`. Raises `RuntimeError` if it does not start.
    """
    port, web = _free_port(), _free_port()
    command = _command(port, web, chunk_tokens, gigabytes, pool)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT})
    try:
        _wait(process, web, log)
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
