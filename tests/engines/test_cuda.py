"""Blocks to and from a device, with a device that records: order, chunks, errors, balance. No GPU is needed."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.bindings.cuda import (
    CudartDevice,
    CupyDevice,
    DeviceError,
    Pieces,
    RecordingDevice,
    Registration,
    Transfers,
)

BLOCK, PAGE = 8192, 4096
EMPTY = {"registered": 0, "streams": 0, "events": 0, "copies": 0}


class Memory:
    """Device memory, for a recording device: an array."""

    def __init__(self, size):
        self.bytes = np.zeros(size, np.uint8)
        self.address = self.bytes.ctypes.data

    def pages(self, count, size=BLOCK, step=None):
        return [[Pieces(self.address + i * (step or size), size)] for i in range(count)]


@pytest.fixture
def pool(make_pool):
    return make_pool(block=BLOCK, blocks=64)


@pytest.fixture
def ns(pool, identity):
    return pool.namespace(identity)


def guarded(pool, **options):
    """A device that refuses copies of pool memory that is not registered."""
    device = RecordingDevice(**options)
    start = pool.writable(0).ctypes.data
    device.guarded.append((start, start + pool.info["payload_bytes"]))
    return device


def names_of(count, what="page"):
    return [f"{what}/{i}" for i in range(count)]


def is_clean(pool):
    report = pool.check()
    return report.clean and report.pins == 0 and report.blocks["reserved"] == 0


def test_a_store_is_published_after_its_event(pool, ns, rack, uri):
    device, memory = guarded(pool), Memory(4 * BLOCK)
    memory.bytes[:] = np.arange(4 * BLOCK) % 251
    keys = ns.named(names_of(4))
    with Transfers(pool, device) as transfers, rack.open(uri) as other:
        theirs = other.namespace(ns.identity)
        transfer = transfers.store(ns, keys, memory.pages(4), after=device.new_event())
        assert not transfer.is_done
        assert not theirs.contains(keys).any()
        assert pool.check().blocks["reserved"] == 4
        assert transfer.finish() == 4 == transfer.finish()
        with theirs.match(keys) as hit:
            assert b"".join(bytes(view) for view in hit.views) == memory.bytes.tobytes()
        order = device.names("register", "stream_wait", "copy", "record", "wait")
        assert order[0] == "register"
        assert order[-2:] == ["record", "wait"]
        assert order.index("stream_wait") < order.index("copy") < order.index("record")
        device.end_event(1 + 2)  # ours: the streams were 1 and 2
    assert device.names()[-1] == "unregister"
    assert device.balance() == EMPTY
    assert is_clean(pool)


def test_a_load_holds_its_pins_until_the_copies_have_ended(pool, ns):
    device, memory = guarded(pool), Memory(3 * BLOCK)
    keys = ns.named(names_of(3))
    data = np.random.default_rng(1).integers(0, 256, (3, BLOCK), np.uint8)
    ns.put(keys, list(data))
    with Transfers(pool, device) as transfers:
        transfer = transfers.load(ns.match(keys), memory.pages(3))
        assert not memory.bytes.any()
        assert pool.check().pins == 3
        assert pool.evict(64) == 0
        stream = device.new_stream()
        transfer.then(stream)
        assert transfer.finish() == 3
        assert np.array_equal(memory.bytes, data.ravel())
        assert pool.check().pins == 0
        device.end_stream(stream)
    assert device.balance() == EMPTY


def test_nothing_is_let_go_before_the_wait(pool, ns, monkeypatch):
    """What stands at the moment when the copies are waited for: they are not done yet."""
    device, memory, seen = guarded(pool), Memory(BLOCK), []
    wait = device.wait

    def watched(event):
        report = pool.check()
        seen.append((report.blocks["reserved"], report.blocks["live"], report.pins, bool(memory.bytes.any())))
        wait(event)

    monkeypatch.setattr(device, "wait", watched)
    with Transfers(pool, device) as transfers:
        ones = np.ones(BLOCK, np.uint8)
        transfers.store(ns, ns.named(["x"]), [[Pieces(ones.ctypes.data, BLOCK)]]).finish()
        transfers.load(ns.match(ns.named(["x"])), memory.pages(1)).finish()
    assert seen == [(1, 0, 0, False), (0, 1, 1, False)]


def test_neighbours_are_one_copy(pool, ns):
    device, memory = guarded(pool), Memory(8 * BLOCK)
    with Transfers(pool, device) as transfers:
        transfer = transfers.store(ns, ns.named(names_of(8)), memory.pages(8))
        runs = 1 + int((np.diff([call.arguments[0] for call in device.calls if call.name == "copy"]) != 0).sum())
        assert device.count("copy") == runs
        copied = sum(call.arguments[2] for call in device.calls if call.name == "copy")
        assert copied == 8 * BLOCK
        assert device.count("copy") < 8
        transfer.finish()


def test_a_fragmented_layout_is_gathered_and_scattered(pool, ns):
    """Pages of 4 layers x (keys, values), 512 bytes each, whose layers lie far apart."""
    device, layers, piece, pages = guarded(pool), 4, 512, 5
    there, back = Memory(2 * layers * pages * piece), Memory(2 * layers * pages * piece)
    there.bytes[:] = np.random.default_rng(2).integers(0, 256, there.bytes.size)

    def parts(memory, page):
        half = layers * pages * piece
        return [Pieces(memory.address + kv * half + page * piece, piece, layers, pages * piece) for kv in (0, 1)]

    keys = ns.named(names_of(pages))
    with Transfers(pool, device, streams=1) as transfers:
        assert transfers.store(ns, keys, [parts(there, i) for i in range(pages)]).finish() == pages
        assert device.count("copy_rows") == 2 * pages
        with ns.match(keys) as hit:
            seen = there.bytes.reshape(2, layers, pages, piece)
            assert np.array_equal(hit.views[3][: 2 * layers * piece].reshape(2, layers, piece), seen[:, :, 3])
        assert transfers.load(ns.match(keys), [parts(back, i) for i in range(pages)]).finish() == pages
    assert np.array_equal(there.bytes, back.bytes)
    assert device.balance() == EMPTY


def test_a_pitch_that_is_too_large_becomes_single_copies(pool, ns):
    device = guarded(pool)
    with Transfers(pool, device) as transfers:
        page = [Pieces(1 << 40, 512, 2, 1 << 31)]
        transfer = transfers.store(ns, ns.named(["x"]), [page])
        copies = [call.arguments for call in device.calls if call.name == "copy"]
        assert [arguments[1] for arguments in copies] == [1 << 40, (1 << 40) + (1 << 31)]
        assert copies[1][0] == copies[0][0] + 512
        for stream in device._streams.values():  # nobody has that memory
            stream.waiting = [lambda: None] * len(stream.waiting)
        transfer.finish()


@pytest.mark.parametrize("chunk", [PAGE, 3 * PAGE, 1 << 20])
def test_memory_is_registered_in_chunks(pool, ns, chunk):
    device, memory = guarded(pool), Memory(16 * BLOCK)
    total = -(-pool.info["payload_bytes"] // PAGE) * PAGE
    memory.bytes[:] = np.random.default_rng(3).integers(0, 256, memory.bytes.size)
    before, keys = memory.bytes.copy(), ns.named(names_of(8))
    with Transfers(pool, device, chunk=chunk) as transfers:
        calls = [call.arguments for call in device.calls if call.name == "register"]
        assert sum(size for _, size in calls) == total
        assert max(size for _, size in calls) <= chunk
        assert [address for address, _ in calls] == list(range(calls[0][0], calls[0][0] + total, chunk))
        # No copy reaches from one chunk into the next, or the device would have refused it.
        assert transfers.store(ns, keys, memory.pages(8)).finish() == 8
        rows = [[Pieces(memory.address + i * BLOCK, 2048, 4, 2049)] for i in range(8)]
        memory.bytes[:] = 0
        assert transfers.load(ns.match(keys), rows).finish() == 8
        assert np.array_equal(memory.bytes[BLOCK + 2049 :][:2048], before[BLOCK + 2048 :][:2048])
    undone = [call.arguments[0] for call in device.calls if call.name == "unregister"]
    assert undone == [address for address, _ in reversed(calls)]
    assert device.balance() == EMPTY


def test_a_terabyte_is_registered_in_chunks_of_256_gib():
    """With a pool that says it is so large: nothing is touched."""
    device = RecordingDevice()
    core = types.SimpleNamespace(
        ffi=types.SimpleNamespace(cast=lambda kind, value: value),
        lib=types.SimpleNamespace(kvp_pool_base=lambda handle: handle),
    )
    info = {"payload_offset": 8 * PAGE, "payload_bytes": (1 << 40) + 12345, "classes": []}
    pool = types.SimpleNamespace(writable=lambda *_: None, core=core, info=info, handle=1 << 45, uri="shm:large")
    with Registration(pool, device):
        sizes = [call.arguments[1] for call in device.calls if call.name == "register"]
        assert sizes == [256 << 30] * 4 + [16384]
    assert device.balance() == EMPTY
    for wrong in (0, PAGE + 1, (256 << 30) + PAGE):
        with pytest.raises(kvpool.InvalidArgument, match="chunks"):
            Registration(pool, device, chunk=wrong)


FAILURES = [
    *[("register", n) for n in (1, 2, 3)],
    ("device_pointer", 2),
    *[("new_stream", n) for n in (1, 2)],
    *[(name, n) for name in ("new_event", "record", "wait", "end_event", "copy", "copy_rows") for n in (1, 2)],
    ("stream_wait", 1),
    ("end_stream", 1),
    ("unregister", 1),
    ("unregister", 3),
]


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_whatever_fails_nothing_is_left(pool, ns, failure):
    """One store and one load, with one call that fails: it is told, and nothing is published that is not whole."""
    name, number = failure
    device, memory = guarded(pool, fail={name: [number]}), Memory(8 * BLOCK)
    memory.bytes[:] = 7
    keys = ns.named(names_of(4))
    parts = [[Pieces(memory.address + i * BLOCK, 2048, 2, 4096), *page] for i, page in enumerate(memory.pages(4, 4096))]
    total = -(-pool.info["payload_bytes"] // PAGE) * PAGE
    chunk = -(-total // 3 // PAGE) * PAGE
    with pytest.raises(DeviceError, match=f"{name}: cudaErrorMemoryAllocation"):  # noqa: PT012, SIM117
        with Transfers(pool, device, chunk=chunk) as transfers:
            transfers.store(ns, keys, parts, after=device.new_event() if name == "stream_wait" else None).finish()
            transfers.load(ns.match(keys), parts).finish()
    left = device.balance()
    if name in ("unregister", "end_stream", "end_event"):
        left.pop({"unregister": "registered", "end_stream": "streams", "end_event": "events"}[name])
    if name == "stream_wait":
        left["events"] -= 1  # the test's own
    assert not any(left.values()), left
    assert is_clean(pool)
    with ns.match(keys) as hit:
        assert all((view == 7).all() for view in hit.views)
        assert len(hit) == 0 or name in ("unregister", "end_stream", "end_event") or number == 2


def test_a_wait_that_fails_publishes_nothing(pool, ns):
    device, memory = guarded(pool, fail={"wait": [1]}, code=719), Memory(BLOCK)
    with Transfers(pool, device) as transfers:
        transfer = transfers.store(ns, ns.named(["x"]), memory.pages(1))
        with pytest.raises(DeviceError, match="cudaErrorLaunchFailure") as caught:
            transfer.finish()
        assert caught.value.device_code == 719
        assert transfer.finish() == 0
        device.run()
    assert not ns.contains(ns.named(["x"])).any()
    assert is_clean(pool)


def test_close_waits_for_what_is_under_way(pool, ns):
    device, memory = guarded(pool), Memory(2 * BLOCK)
    keys = ns.named(names_of(2))
    transfers = Transfers(pool, device)
    transfers.store(ns, keys, memory.pages(2))
    transfers.close()
    transfers.close()
    assert device.balance() == EMPTY
    assert device.names("wait", "end_stream", "unregister") == ["wait", "end_stream", "end_stream", "unregister"]
    assert not ns.contains(keys).any()
    assert is_clean(pool)


def test_aborted_is_given_back(pool, ns):
    device, memory = guarded(pool), Memory(2 * BLOCK)
    keys = ns.named(names_of(2))
    with Transfers(pool, device) as transfers:
        transfer = transfers.store(ns, keys, memory.pages(2))
        transfer.abort()
        assert transfer.finish() == 0
        ns.put(keys, [np.ones(BLOCK, np.uint8)] * 2)
        transfer = transfers.load(ns.match(keys), memory.pages(2))
        transfer.abort()
        assert transfer.result == 0
    assert is_clean(pool)


def test_a_pool_that_is_closed_under_a_load(pool, ns):
    device, memory = guarded(pool), Memory(BLOCK)
    ns.put(ns.named(["x"]), [np.ones(BLOCK, np.uint8)])
    transfers = Transfers(pool, device)
    transfer = transfers.load(ns.match(ns.named(["x"])), memory.pages(1))
    pool.close()
    with pytest.raises(kvpool.Closed):
        transfer.finish()
    assert transfer.result == 0
    transfers.close()
    assert device.balance() == EMPTY


def test_the_memory_stays_mapped_until_it_is_unregistered(identity):
    device = RecordingDevice()
    pool = kvpool.create("memfd:", block=BLOCK, blocks=16)
    registration = Registration(pool, device)
    start, end = (next(iter(device.registered.items()))[0], sum(next(iter(device.registered.items()))))

    def is_mapped():
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            if first <= start and end <= last:
                return True
        return False

    pool.close()
    registration.pool = None
    del pool
    gc.collect()
    assert is_mapped()
    registration.close()
    gc.collect()
    assert not is_mapped()


def test_a_forked_child_leaves_the_device_alone(pool):
    device = guarded(pool)
    transfers = Transfers(pool, device)
    calls = len(device.calls)
    child = os.fork()
    if child == 0:
        transfers.close()
        os._exit(0 if len(device.calls) == calls else 1)
    assert os.waitpid(child, 0)[1] == 0
    transfers.close()
    assert device.balance() == EMPTY


def test_kernels_see_all_blocks_of_a_class(make_pool):
    pool = make_pool(block=["8KiB", "4KiB"], size="2MiB")
    device = RecordingDevice(delta=1 << 44)
    with Registration(pool, device, chunk=1 << 20) as registration:
        base = pool.writable(0).ctypes.data
        assert registration.device_pointer() == base + (1 << 44)
        assert registration.device_pointer(1, 3) == base + 3 * 4096 + (1 << 44)
        interface = registration.device_array(0).__cuda_array_interface__
        assert interface["shape"] == (pool.info["classes"][0]["blocks"], 8192)
        assert interface["data"] == (base + (1 << 44), False)
        for wrong in ((2, 0), (0, 1 << 20), (0, -1)):
            with pytest.raises(kvpool.OutOfRange):
                registration.address(*wrong)

    class Apart(RecordingDevice):
        def device_pointer(self, address):
            return super().device_pointer(address) + 4096 * len(self.calls)

    with Registration(pool, Apart(), chunk=1 << 20) as registration, pytest.raises(DeviceError, match="one distance"):
        registration.device_pointer()


def test_pages_that_do_not_fit_are_refused(pool, ns):
    device, memory = guarded(pool), Memory(2 * BLOCK)
    keys = ns.named(names_of(2))
    with Transfers(pool, device) as transfers:
        for pages in (memory.pages(1), memory.pages(2, BLOCK + 64, BLOCK), [[], []]):
            with pytest.raises(kvpool.InvalidArgument, match="page"):
                transfers.store(ns, keys, pages)
            ns.put(keys, [np.ones(BLOCK, np.uint8)] * 2)
            with pytest.raises(kvpool.InvalidArgument, match="page"):
                transfers.load(ns.match(keys), pages)
            assert is_clean(pool)
    for wrong in ((0, 1), (1, 0), (2, 2, 1)):
        with pytest.raises(kvpool.InvalidArgument):
            Pieces(0, wrong[0], *wrong[1:])
    with pytest.raises(kvpool.InvalidArgument, match="stream"):
        Transfers(pool, device, streams=0)


# ---- the runtime ----


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """A libcudart that writes down its arguments."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed")
    target = tmp_path_factory.mktemp("stub") / "libcudart_stub.so"
    source = Path(__file__).with_name("cudart_stub.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", source, "-o", target], check=True)
    library = ctypes.CDLL(str(target))
    library.stub_told.restype = ctypes.c_char_p
    return library


def test_the_arguments_of_every_call(stub):
    stub.stub_answer(0)
    stub.stub_forget()
    device = CudartDevice(stub, 3)
    high = 0x7F12_3456_7000
    device.register(high, 256 << 30)
    assert device.device_pointer(high) == high + 4096
    stream, event = device.new_stream(), device.new_event()
    assert (stream, event) == (0x7F0011223344, 0x7F0055667788)
    device.copy(high, 0x10, 5 << 32, stream)
    device.copy_rows(high, 1 << 30, 0x20, 77, 66, 55, stream)
    device.record(event, stream)
    assert device.is_done(event)
    device.wait(event)
    device.stream_wait(stream, event)
    device.drain(stream)
    device.end_event(event)
    device.end_stream(stream)
    device.unregister(high)
    assert stub.stub_told().decode().strip(";").split(";") == [
        "setDevice 3",
        f"register {high:#x} {256 << 30} 3",
        f"pointer {high:#x} 0",
        "stream 1",
        "event 2",
        f"copy {high:#x} 0x10 {5 << 32} 4 {stream:#x}",
        f"rows {high:#x} {1 << 30} 0x20 77 66 55 4 {stream:#x}",
        f"record {event:#x} {stream:#x}",
        f"query {event:#x}",
        f"wait {event:#x}",
        f"streamWait {stream:#x} {event:#x} 0",
        f"drain {stream:#x}",
        f"endEvent {event:#x}",
        f"endStream {stream:#x}",
        f"unregister {high:#x}",
    ]


def test_every_return_code_is_checked(stub):
    stub.stub_answer(0)
    device = CudartDevice(stub)
    stub.stub_answer(2)
    calls = {
        "register": (4096, 4096),
        "unregister": (4096,),
        "device_pointer": (4096,),
        "new_stream": (),
        "end_stream": (1,),
        "drain": (1,),
        "copy": (1, 2, 3, 4),
        "copy_rows": (1, 2, 3, 4, 5, 6, 7),
        "new_event": (),
        "record": (1, 2),
        "is_done": (1,),
        "wait": (1,),
        "stream_wait": (1, 2),
        "end_event": (1,),
    }
    from kvpool.bindings.cuda.device import Device

    assert set(calls) == {name for name in vars(Device) if not name.startswith("_")}
    for name, arguments in calls.items():
        with pytest.raises(DeviceError, match="cudaErrorMemoryAllocation") as caught:
            getattr(device, name)(*arguments)
        assert caught.value.device_code == 2
    stub.stub_answer(600)
    assert device.is_done(1) is False
    stub.stub_answer(100)
    with pytest.raises(DeviceError, match="cudaSetDevice"):
        CudartDevice(stub)
    stub.stub_answer(0)
    with pytest.raises(kvpool.NotFound, match="no CUDA runtime"):
        CudartDevice(Hollow(stub))


class Hollow:
    """A library that has the error names and nothing else."""

    def __init__(self, library):
        self.cudaGetErrorName = library.cudaGetErrorName


class CupyFailure(RuntimeError):
    def __init__(self, status):
        super().__init__("cudaErrorNotReady: device not ready" if status == 600 else "cudaErrorMemoryAllocation: no")
        self.status = status


class CupyRuntime(types.ModuleType):
    """cupy.cuda.runtime as far as it is used: it raises instead of returning codes."""

    CUDARuntimeError = CupyFailure

    def __init__(self):
        super().__init__("cupy.cuda.runtime")
        self.calls, self.status, self.query = [], 0, 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            if self.status:
                raise CupyFailure(self.status)
            if name == "pointerGetAttributes":
                return types.SimpleNamespace(devicePointer=arguments[0] + 1)
            return {"getDeviceCount": 1, "getDevice": 0, "eventQuery": self.query}.get(name, 9)

        return call


def test_cupy_is_called_by_its_names(monkeypatch):
    runtime = CupyRuntime()
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy.cuda.runtime", runtime)
    device = CupyDevice()
    device.register(4096, 8192)
    assert device.device_pointer(4096) == 4097
    assert device.new_stream() == 9
    device.copy(1, 2, 3, 9)
    device.copy_rows(1, 2, 3, 4, 5, 6, 9)
    assert device.is_done(device.new_event())
    assert runtime.calls[2:6] == [
        ("setDevice", 0),
        ("hostRegister", 4096, 8192, 3),
        ("pointerGetAttributes", 4096),
        ("streamCreateWithFlags", 1),
    ]
    assert ("memcpy2DAsync", 1, 2, 3, 4, 5, 6, 4, 9) in runtime.calls
    runtime.status = 2
    for name, arguments in {
        "drain": (1,),
        "record": (1, 2),
        "wait": (1,),
        "stream_wait": (1, 2),
        "end_event": (1,),
    }.items():
        with pytest.raises(DeviceError, match="cudaErrorMemoryAllocation"):
            getattr(device, name)(*arguments)
    for name in ("unregister", "end_stream", "is_done"):
        with pytest.raises(DeviceError):
            getattr(device, name)(1)
    runtime.status = 600
    assert device.is_done(1) is False
    runtime.status, runtime.query = 0, 600  # returned instead of raised
    assert device.is_done(1) is False
    runtime.query = 719
    with pytest.raises(DeviceError, match="719"):
        device.is_done(1)


def test_the_real_cupy_has_these_names():
    runtime = pytest.importorskip("cupy.cuda.runtime", reason="cupy is not installed")
    used = (
        "hostRegister hostUnregister pointerGetAttributes streamCreateWithFlags streamDestroy streamSynchronize "
        "memcpyAsync memcpy2DAsync eventCreateWithFlags eventRecord eventQuery eventSynchronize eventDestroy "
        "streamWaitEvent setDevice getDevice getDeviceCount CUDARuntimeError"
    )
    assert not [name for name in used.split() if not hasattr(runtime, name)]


def test_without_a_device_it_says_why():
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import kvpool.bindings.cuda as c; c.find_device()"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        pytest.skip("there is a GPU: see test_gpu.py")
    assert "NotFound" in done.stderr
    assert "torch" in done.stderr
    assert "cupy" in done.stderr
