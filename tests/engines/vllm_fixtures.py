"""Fixtures of the vLLM tests: models, driver processes that live for a module, pools that go away. Import them by
name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
from pathlib import Path

import pytest
import vllm_models
from vllm_client import Client

import kvpool

HERE = Path(__file__).parent
_numbers = itertools.count()
PROMPT, LENGTH = [1, 900], 900  # of the prompts: 7 blocks of 128, 3 of 256, 56 of 16


def need_vllm():
    """At the head of each module: skip it where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-engines", allow_module_level=True)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A function: kind and seed -> folder of a saved model."""
    root = Path(os.environ.get("KVPOOL_TEST_MODELS") or tmp_path_factory.mktemp("models"))
    root.mkdir(exist_ok=True)
    return lambda kind, seed=0: vllm_models.save(kind, root / f"{kind}-{seed}", seed)


@pytest.fixture(scope="module")
def make_client(tmp_path_factory):
    """Driver processes; all end with the module."""
    clients = []

    def make(**environment):
        clients.append(Client(tmp_path_factory.mktemp("driver") / "log", **environment))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def first(make_client):
    """A process whose engines compute and store."""
    return make_client()


@pytest.fixture(scope="module")
def second(make_client):
    """Another process, whose engines load."""
    return make_client()


@pytest.fixture(scope="module")
def truth(first, models, tmp_path_factory):
    """A function: what a model says without us, and what it says where the prefix was loaded.

    The two are the same, but for MLA on a CPU: after a loaded prefix vLLM computes with other kernels than in one pass.
    There the second is what vLLM says with its own example connector.
    """
    known = {}

    def tell(kind, changes):
        if kind not in known:
            model = models(kind)
            first.engine(model, **changes)
            alone = after = first.generate(PROMPT)[0]
            if kind == "deepseek":
                extra = {"shared_storage_path": str(tmp_path_factory.mktemp("example"))}
                connector = {"kv_connector": "ExampleConnector", "kv_connector_module_path": None}
                first.call("engine", model=model, extra=extra, connector=connector, **changes)
                first.generate(PROMPT)
                after = first.generate(PROMPT)[0]
                assert after["cached"] == 896
                assert after["tokens"] == alone["tokens"]
            known[kind] = alone, after
        return known[kind]

    return tell


@pytest.fixture
def uri():
    """The name of a pool that an engine makes; it is removed at the end."""
    name = f"shm:vllm-test-{os.getpid()}-{next(_numbers)}"
    yield name
    with contextlib.suppress(kvpool.Error):
        kvpool.remove(name, force=True)


@contextlib.contextmanager
def looking(uri):
    """The pool, from the test's own process."""
    with kvpool.open(uri) as pool:
        yield pool


def demand_clean(uri, *, pins=0):
    """Every structure is whole, nothing is leaked or held."""
    with looking(uri) as pool:
        report = pool.check()
    assert report.clean, report.problems
    assert report.leaked == 0
    assert report.pins == pins


def corrupt(uri):
    """Every other byte of every block."""
    with looking(uri) as pool:
        for number in range(len(pool.block_bytes)):
            pool.writable(number)[:, ::2] = 0x3F
