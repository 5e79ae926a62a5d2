"""LMCache's server under vLLM, with a pool as its second level: prefill in one engine, hit in another, through the
pool.

The server is started anew in between, so that its own memory is empty and what the second engine finds can only have
come from the pool. The model has real random weights, so that its tokens and probabilities depend on keys and values;
and a pool that is corrupted must change them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import eventually

for needed in ("torch", "transformers", "vllm", "lmcache"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

ENGINE = Path(__file__).with_name("lmcache_engine.py")
STATED = {"revision": "1", "dtype": "bfloat16", "chunk_tokens": 128}
CHUNKS, CHUNK_TOKENS, TOKENS = 3, 128, 450


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=1024,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.25,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def server(uri, log):
    """LMCache's server, whose second level is the pool; yields its port."""
    port, web = free_port(), free_port()
    adapter = {
        "type": "native_plugin",
        "module_path": "kvpool.bindings.lmcache",
        "class_name": "PoolClient",
        "adapter_params": {"uri": uri, **STATED},
    }
    command = [sys.executable, "-P", "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--l1-size-gb",
        "0.25",
        "--chunk-size",
        str(CHUNK_TOKENS),
        "--max-workers",
        "2",
        "--eviction-policy",
        "LRU",
    ]
    command += [
        "--hash-algorithm",
        "sha256_cbor",
        "--supported-transfer-mode",
        "engine_driven",
        "--shm-name",
        f"kvp{port}",
    ]
    command += ["--http-host", "127.0.0.1", "--http-port", str(web), "--disable-metrics"]
    command += ["--l2-adapter", json.dumps(adapter)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        )

    def answers():
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{web}/", timeout=1):
            return True
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", web), 1):
            return True
        time.sleep(0.5)
        return False

    try:
        assert eventually(answers, 180), log.read_text()[-4000:]
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def generate(model, *port):
    done = subprocess.run(
        [sys.executable, "-P", ENGINE, model, *map(str, port)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if "ANSWER " in line]
    assert answers, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(answers[-1].partition("ANSWER ")[2])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_engine_finds_in_the_pool_what_another_has_stored(model, make_pool, uri, tmp_path):
    pool = make_pool(block="64KiB", blocks=64)
    log = tmp_path / "server.log"
    alone = generate(model)
    assert alone["cached"] == 0
    with server(uri, log) as port:
        assert generate(model, port) == alone
        assert eventually(lambda: pool.check().blocks["live"] >= CHUNKS, 30), log.read_text()[-4000:]
    with server(uri, log) as port:  # its own memory is empty
        before = pool.stats()["hits"]
        again = generate(model, port)
        assert again["cached"] == CHUNKS * CHUNK_TOKENS, log.read_text()[-4000:]
        assert (again["tokens"], again["logprob"]) == (alone["tokens"], alone["logprob"])
        assert pool.stats()["hits"] > before
    blocks = pool.writable(0)
    blocks[:, : blocks.shape[1] - 64] ^= 0x40  # all but the trailers
    with server(uri, log) as port:
        wrong = generate(model, port)
        assert wrong["cached"] == CHUNKS * CHUNK_TOKENS
        assert wrong["logprob"] != alone["logprob"]
    assert pool.check().clean
    assert eventually(lambda: pool.check().pins == 0)
