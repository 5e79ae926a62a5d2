"""SGLang's storage interface on a pool: its own factory, its own host cache, in each of its layouts, on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import textwrap
import types
from unittest.mock import MagicMock

import pytest
from conftest import eventually

import kvpool

torch = pytest.importorskip("torch", reason="torch is not installed")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

# One a word: what the engine imports and a CPU has not.
ABSENT = set(
    """torchvision sgl_kernel flashinfer deep_gemm flash_attn sgl_flash_mla tilelang decord soundfile gguf
    xatlas av timm modelscope datasets outlines blobfile IPython openai_harmony tml_renderers pynvml py_spy quack
    torch_memory_saver cutlass humming distro sglang_kernel build torchaudio kernels""".split()  # noqa: SIM905
)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for packages of the engine that need a GPU; the host cache imports them and does not use them on a CPU."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        made = MagicMock(name=spec.name)
        made.__path__, made.__spec__, made.__name__, made.__version__ = [], spec, spec.name, "99.0"
        return made

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def sglang():
    """The parts of SGLang that run without a GPU, without its __init__, which imports the whole engine."""
    finder, before = Absent(), set(sys.modules)
    sys.meta_path.append(finder)
    package = types.ModuleType("sglang")
    package.__path__ = list(importlib.util.find_spec("sglang").submodule_search_locations)
    package.__version__ = "0.0.test"
    sys.modules["sglang"] = package
    try:
        import transformers  # noqa: F401 - before the stand-ins are looked at by it

        parts = {
            "hicache_storage": "HiCacheStorageConfig HiCacheStorageExtraInfo",
            "device_pool_info": "KVBufferLayout KVBuffers MHABufferInfo",
            "pool_host.mha": "MHATokenToKVPoolHost",
            "storage.backend_factory": "StorageBackendFactory",
        }
        found = types.SimpleNamespace()
        for module, names in parts.items():
            loaded = importlib.import_module(f"sglang.srt.mem_cache.{module}")
            for name in names.split():
                setattr(found, name, getattr(loaded, name))
        yield found
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in {*ABSENT, "sglang"}:
                del sys.modules[name]


LAYERS, HEADS, DIM, PAGE, TOKENS = 2, 2, 16, 16, 64
PAGE_BYTES = 2 * LAYERS * HEADS * DIM * PAGE * 2
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.fixture
def host_of(sglang):
    def host(layout, dtype=torch.bfloat16, page=PAGE):
        keys = [torch.zeros(TOKENS + page, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)]
        values = [torch.zeros_like(each) for each in keys]

        def pointers(tensors):
            return torch.tensor([each.data_ptr() for each in tensors], dtype=torch.uint64)

        fields = {
            "k": tuple(keys),
            "v": tuple(values),
            "k_data_ptrs": pointers(keys),
            "v_data_ptrs": pointers(values),
            "layout": sglang.KVBufferLayout.NHD,
        }
        known = sglang.KVBuffers.__struct_fields__
        buffers = sglang.KVBuffers(**{name: value for name, value in fields.items() if name in known})
        info = sglang.MHABufferInfo(
            buffers=buffers,
            page_size=page,
            head_num=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        made = sglang.MHATokenToKVPoolHost(
            info,
            2.0,
            0,
            page,
            layout,
            pin_memory=False,
            device="cpu",
            allocator_type="default",
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS - 1,
            host_token_capacity=TOKENS * 4,
        )
        made.kv_buffer.copy_(torch.randn(made.kv_buffer.shape))
        return made

    return host


@pytest.fixture
def config(sglang, uri):
    return sglang.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="tiny",
        extra_config={
            "backend_name": "kvpool",
            "module_path": "kvpool.bindings.sglang",
            "class_name": "PoolStorage",
            "interface_v1": 1,
            "uri": uri,
            "revision": "1",
        },
    )


@pytest.fixture
def pool(make_pool):
    return make_pool(block=8192, blocks=64)


@pytest.fixture
def backend_of(sglang, config, pool):
    """Backends as SGLang makes them, from their configuration."""
    made = []

    def backend(host=None, extra=None, **options):
        chosen = dataclasses.replace(config, **options)
        chosen.extra_config = {**config.extra_config, **(extra or {})}
        made.append(sglang.StorageBackendFactory.create_backend("dynamic", chosen, host))
        if host is not None:
            made[-1].register_mem_pool_host(host)
        return made[-1]

    yield backend
    for each in made:
        each.close()


def hashes(count, start=0):
    return [f"{i:064x}" for i in range(start, start + count)]


def pages_of(host, indices):
    return [host.get_data_page(int(indices[i])).clone() for i in range(0, len(indices), host.page_size)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_of_pages(backend_of, host_of, layout):
    host = host_of(layout)
    backend = backend_of(host)
    keys, there, back = hashes(4), host.alloc(4 * PAGE), host.alloc(4 * PAGE)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, back) == [False] * 4
    assert backend.batch_set_v1(keys[:3], there[: 3 * PAGE]) == [True] * 3
    assert backend.batch_exists(keys) == 3
    before = pages_of(host, back)
    assert backend.batch_get_v1(keys, back) == [True, True, True, False]
    assert same(pages_of(host, back)[:3], pages_of(host, there)[:3])
    assert same(pages_of(host, back)[3:], before[3:])
    assert backend.batch_set_v1(keys, there) == [True] * 4
    assert backend.door.misses == {}
    assert backend_of(host_of(layout)).batch_exists(keys) == 4  # another engine of the same configuration


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_of_flat_copies(backend_of, host_of, layout):
    host = host_of(layout)
    backend = backend_of(host, {"interface_v1": 0})
    keys, there = hashes(3), host.alloc(3 * PAGE)
    data = pages_of(host, there)
    assert backend.batch_set(keys[:2], data[:2]) is True
    assert backend.set(keys[2], data[2]) is True
    assert backend.exists(keys[2])
    assert backend.batch_exists([*keys, "nobody"]) == 3
    targets = [host.get_dummy_flat_data_page() for _ in range(4)]
    got = backend.batch_get([*keys, "nobody"], targets)
    assert got[3] is None
    for page, target in zip(data, got, strict=False):
        assert torch.equal(page.flatten(), target.flatten())
    assert torch.equal(backend.get(keys[0], targets[3]).flatten(), data[0].flatten())
    assert backend.get(keys[0], torch.zeros(7)) is None
    assert backend.get(keys[0]) is None
    assert backend.set("x", torch.zeros(7)) is False


def test_a_prefix_of_a_chain_is_what_counts(backend_of, host_of, pool):
    host = host_of("page_first")
    backend = backend_of(host)
    keys, indices = hashes(4), host.alloc(4 * PAGE)
    backend.batch_set_v1(keys, indices)
    namespace = backend._namespaces["pieces"]
    assert namespace.remove(namespace.named(keys[1:2])) == 1
    assert backend.batch_exists(keys) == 1
    assert backend.batch_get_v1(keys, indices) == [True, False, False, False]
    assert pool.check().pins == 0


def test_the_tail_of_a_long_chain_goes_first(backend_of, host_of, pool, sglang):
    host = host_of("page_first")
    backend = backend_of(host)
    keys = hashes(12)
    for start in range(0, 12, 4):
        told = sglang.HiCacheStorageExtraInfo(prefix_keys=keys[:start])
        assert all(backend.batch_set_v1(keys[start : start + 4], host.alloc(4 * PAGE), told))
    pool.evict(5)
    assert backend.batch_exists(keys) == 7


@pytest.mark.parametrize(
    "other",
    [
        {"extra": {"revision": "2"}},
        {"extra": {"tenant": "b"}},
        {"extra": {"adapter": "lora"}},
        {"model_name": "other"},
        {"tp_size": 2},
        {"pp_size": 2},
        {"attn_cp_size": 2},
        {"tp_lcm_size": 4},
        {"layout": "page_head"},
        {"dtype": torch.float16},
        {"page": 8},
    ],
    ids=str,
)
def test_another_identity_is_a_miss(backend_of, host_of, other):
    host = host_of("page_first")
    backend_of(host).batch_set_v1(hashes(2), host.alloc(2 * PAGE))
    shape = {name: other.pop(name) for name in ("layout", "dtype", "page") if name in other}
    stranger = backend_of(host_of(shape.pop("layout", "page_first"), **shape), **other)
    assert stranger.batch_exists(hashes(2)) == 0
    assert backend_of(host_of("page_first")).batch_exists(hashes(2)) == 2


def test_latent_pages_are_stored_by_one_rank_and_read_by_all(backend_of, host_of):
    host = host_of("page_first")
    latent = {"is_mla_model": True, "tp_size": 2}
    writer, reader = backend_of(host, tp_rank=0, **latent), backend_of(host, tp_rank=1, **latent)
    assert reader.batch_set_v1(hashes(1), host.alloc(PAGE)) == [True]
    assert reader.batch_exists(hashes(1)) == 0
    assert writer.batch_set_v1(hashes(1), host.alloc(PAGE)) == [True]
    assert reader.batch_exists(hashes(1)) == 1


def test_after_a_clear_nothing_is_found(backend_of, host_of):
    host = host_of("page_first")
    backend, other = backend_of(host), backend_of(host)
    backend.batch_set_v1(hashes(2), host.alloc(2 * PAGE))
    backend.clear()
    assert backend.batch_exists(hashes(2)) == 0
    assert other.batch_exists(hashes(2)) == 2
    assert backend.batch_set_v1(hashes(1), host.alloc(PAGE)) == [True]
    assert backend.batch_exists(hashes(2)) == 1


def test_a_full_pool_stores_less_and_says_so(backend_of, host_of, pool, identity):
    host = host_of("page_first")
    backend = backend_of(host)
    everything = pool.namespace(identity).reserve(pool.info["classes"][0]["blocks"] - 2)
    assert backend.batch_set_v1(hashes(3), host.alloc(3 * PAGE)) == [False] * 3
    assert backend.door.misses == {"PoolFull": 1}
    assert backend.batch_set_v1(hashes(2), host.alloc(2 * PAGE)) == [True] * 2
    everything.withdraw()


def test_a_pool_that_is_made_anew_is_opened_again(backend_of, host_of, pool, uri, make_pool, monkeypatch):
    monkeypatch.setattr("kvpool.bindings.door.REOPEN_S", 0)
    host = host_of("page_first")
    backend, indices = backend_of(host), host.alloc(2 * PAGE)
    backend.batch_set_v1(hashes(2), indices)
    kvpool.remove(uri, force=True)
    assert backend.batch_exists(hashes(2)) == 0
    assert backend.batch_get_v1(hashes(2), indices) == [False, False]
    assert backend.batch_set_v1(hashes(2), indices) == [False, False]
    pool.close()
    make_pool(block=8192)
    assert backend.batch_exists(hashes(2)) == 0
    assert backend.batch_set_v1(hashes(2), indices) == [True, True]
    assert backend.batch_exists(hashes(2)) == 2


def test_what_cannot_be_is_refused_at_start(backend_of, host_of, make_pool, config):
    from kvpool.bindings.sglang import PoolStorage

    for wrong in ({"uri": ""}, {"revision": None}):
        with pytest.raises(kvpool.InvalidArgument, match="extra config"):
            backend_of(extra=wrong)
    with pytest.raises(kvpool.InvalidArgument, match="names no model"):
        backend_of(model_name=None)
    with pytest.raises(kvpool.NotFound):
        backend_of(extra={"uri": "shm:nobody-has-this"})
    small = make_pool(uri="memfd:", block=4096)
    with pytest.raises(kvpool.InvalidArgument, match=f"--block {2 * PAGE_BYTES}"):
        backend_of(host_of("page_first", page=2 * PAGE), {"uri": small.uri})
    with pytest.raises(kvpool.InvalidArgument, match="hybrid"):
        backend_of(host_of("page_first")).register_mem_host_pool_v2(None, "mamba")
    early = PoolStorage(config, {})
    assert early.batch_exists(hashes(1)) == 0
    assert early.door.misses == {"NotReady": 1}
    early.close()


def test_pages_of_another_size_are_refused(backend_of, host_of, monkeypatch):
    host = host_of("page_first")
    backend, indices = backend_of(host), host.alloc(PAGE)
    monkeypatch.setattr(host, "get_page_buffer_meta", lambda _: ([host.kv_buffer.data_ptr()], [64]))
    assert backend.batch_set_v1(hashes(1), indices) == [False]
    assert backend.batch_get_v1(hashes(1), indices) == [False]
    assert backend.door.misses == {"InvalidArgument": 2}


def test_what_a_killed_process_has_stored_is_read(backend_of, host_of, pool, uri):
    """The bytes of a page by another process, under the key and identity of this backend; it is killed as it stores."""
    host = host_of("page_first")
    backend = backend_of(host)
    namespace = backend._namespaces["pieces"]
    program = """
        import sys, json, kvpool, numpy as np
        pool = kvpool.open(sys.argv[1])
        fields = json.loads(sys.argv[2])
        fields["rank"] = tuple(fields["rank"])
        fields["extra"] = tuple(tuple(each) for each in fields["extra"])
        ns = pool.namespace(kvpool.Identity(**fields))
        ns.put(ns.named([f"{0:064x}"]), [np.full(int(sys.argv[3]), 3, np.uint8)])
        new = ns.reserve(4)
        new.views[0][:] = 9
        print(flush=True)
        sys.stdin.read()
    """
    fields = json.dumps(dataclasses.asdict(namespace.identity))
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(program), uri, fields, str(PAGE_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    indices = host.alloc(2 * PAGE)
    assert backend.batch_get_v1(hashes(2), indices) == [True, False]
    page = pages_of(host, indices)[0]
    assert (page.contiguous().view(torch.uint8) == 3).all()
    assert eventually(lambda: pool.check().clean and pool.check().blocks["reserved"] == 0)
