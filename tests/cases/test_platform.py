"""Cases of kernels, containers and hosts that do not do what is asked: refused with the reason, or done another way."""

from __future__ import annotations

import os
import platform
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import eventually, fill, payload, said

import kvpool
from kvpool.testing import Rack

# A filter of system calls, as a container's: (call, argument, mask, value) -> the error that it answers.
DENY = """
import ctypes, errno, struct
CALLS = {"madvise": 28, "fallocate": 285, "mbind": 237, "openat": 257, "ftruncate": 77, "mlock": 149}
def deny(call, error, argument=None, value=0, mask=0xFFFFFFFF):
    def op(code, k, yes=0, no=0):
        return struct.pack("HBBI", code, yes, no, k)
    program = op(0x20, 0) + op(0x15, CALLS[call], 0, 4 if argument is not None else 1)
    if argument is not None:
        program += op(0x20, 16 + 8 * argument) + op(0x54, mask) + op(0x15, value, 0, 1)
    program += op(0x06, 0x00050000 | error) + op(0x06, 0x7FFF0000)
    libc, held = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(program)
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(held)))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, whole):
        say("no filter"); sys.exit(0)
"""
POPULATE, COLLAPSE, TMPFILE = 23, 25, 0o20000000


@pytest.fixture
def under(start, uri):
    """What a program says that makes and fills a pool under such a filter."""
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of its system calls are those of x86-64")

    def run(*denials, options="", where=None):
        body = DENY + "".join(f"deny({denial})\n" for denial in denials)
        body += f"""
try:
    pool = kvpool.create(sys.argv[1]{options}, size="8MiB", block="64KiB")
    ns = pool.namespace(identity); keys = ns.keys(range(160))
    fill(ns, keys, 65536)
    with ns.match(keys) as hit:
        right = all(np.array_equal(v, payload(k, 65536)) for k, v in zip(keys, hit.views))
    with kvpool.open(sys.argv[1]) as other:
        say("made", right, pool.check().clean, len(other.namespace(identity).match(keys)))
except kvpool.Error as error:
    say(type(error).__name__, str(error))
"""
        out = said(start(body, where or uri))
        if out == "no filter\n":
            pytest.skip("no filter of system calls may be set here")
        return out.strip()

    return run


REFUSALS = {
    "populate": ("'madvise', {}, 2, 23",),
    "collapse": ("'madvise', {}, 2, 25",),
    "every hint": ("'madvise', {}",),
    "fallocate": ("'fallocate', {}",),
    "both": ("'madvise', {}", "'fallocate', {}"),
    "mlock": ("'mlock', {}",),
}


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
@pytest.mark.parametrize("what", REFUSALS)
def test_M05_hints_that_a_kernel_does_not_know_are_done_without(under, what, error):
    denials = [each.format(f"errno.{error}") for each in REFUSALS[what]]
    assert under(*denials) == "made True True 10"


def test_M05_twin_opening_needs_no_hint_and_changes_nothing(start, tmp_path, identity):
    path = tmp_path / "pool"
    with kvpool.create(f"file:{path}", blocks=64, block="4KiB") as pool:
        fill(pool.namespace(identity), pool.namespace(identity).keys(range(160)))
    payload_at = pool.info["payload_offset"]
    before = path.read_bytes()[payload_at:]
    body = (
        DENY
        + "deny('madvise', errno.EINVAL)\ndeny('fallocate', errno.EPERM)\nkvpool.open(sys.argv[1]).close(); say('in')"
    )
    assert said(start(body, f"file:{path}")) in ("in\n", "no filter\n")
    assert path.read_bytes()[payload_at:] == before


def test_M06_a_node_that_cannot_be_bound_is_told(under, uri):
    assert under("'mbind', errno.EPERM") == "made True True 10"  # nobody asked for a node
    kvpool.remove(uri)
    told = under("'mbind', errno.EPERM", options="+'?node=0'", where=uri)
    assert "cannot bind to the NUMA nodes" in told
    for node in ("63", "64", "-1", "x", ""):
        with pytest.raises(kvpool.InvalidArgument):
            kvpool.create(f"{uri}?node={node}", "8MiB")
    assert not [name for name in os.listdir("/dev/shm") if uri[4:] in name]


def test_M07_huge_pages_that_are_not_there_are_refused_at_create(start):
    body = """
        try:
            pool = kvpool.create("hugetlb:2MiB", "4GiB", "64KiB"); say("made")
        except kvpool.NoSpace as error:
            say("refused", "huge pages" in str(error), "shm:" in str(error))
    """
    assert said(start(body)) == "refused True True\n"


@pytest.mark.parametrize("seed", range(2))
def test_M10_a_reader_sees_the_old_a_miss_or_the_whole_new_value(seed, identity):
    """Caches that nothing keeps coherent, whose lines come and go at random: values are replaced while others read."""
    with Rack(2, seed=seed, blocks=32) as rack:
        writer, reader = (rack.pool(host).namespace(identity) for host in (0, 1))
        keys, out, found = writer.named([str(i) for i in range(8)]), np.zeros((8, 4096), np.uint8), 0
        for value in range(1, 40):
            writer.remove(keys)
            with writer.reserve(keys) as new:
                for view in new.views:
                    view[:] = value
                new.publish()
            got = reader.get_into(keys, out)
            found += got.sum()
            for row, there in zip(out, got, strict=True):
                assert not there or (row.min() == row.max() and 0 < row[0] <= value)
            with reader.match(keys) as hit:
                found += len(hit)
                assert all(view.min() == view.max() <= value for view in hit.views)
        assert found > 40
        assert rack.check() == []


def mapped():
    """Every range of addresses of this process that belongs to a pool."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "kvpool" in line or "/dev/shm" in line:
            yield tuple(int(each, 16) for each in line.split()[0].split("-"))


def test_M12_nothing_in_the_pool_is_an_address(pool, ns, identity, rack, uri):
    """Two handles map it at two places; neither place stands in its metadata, and all works from both."""
    with kvpool.open(uri) as other:
        theirs = other.namespace(identity)
        assert pool.tensor().ctypes.data != other.tensor().ctypes.data
        for i in range(50):
            keys = ns.keys(range(160 * i, 160 * i + 80))
            fill((ns, theirs)[i % 2], keys)
            with (theirs, ns)[i % 2].match(keys) as hit:
                assert all(np.array_equal(v, payload(k)) for k, v in zip(keys, hit.views, strict=True))
        hit, new = theirs.match(keys), ns.reserve(2)
        ranges = list(mapped())
        assert len(ranges) >= 2
        metadata = Path(rack.path(uri)).read_bytes()[: pool.info["payload_offset"]]
        words = np.array(struct.unpack(f"<{len(metadata) // 8}Q", metadata), np.uint64)
        for start, end in ranges:
            assert not ((words >= start) & (words < end)).any()
        hit.release(), new.withdraw()


def test_M13_many_views_need_few_descriptors_and_mappings(start, uri):
    body = """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        pool = kvpool.create(sys.argv[1], blocks=20000, block="4KiB"); ns = pool.namespace(identity)
        names = [str(i) for i in range(10000)]
        def count():
            return len(os.listdir("/proc/self/fd")), len(open("/proc/self/maps").readlines())
        for i in range(0, 10000, 500): ns.put(ns.named(names[i:i + 500]), np.ones((500, 4096), np.uint8))
        before = count(); hits = []; views = []
        for i in range(0, 1000, 100):
            hits.append(ns.match(ns.named(names[i:i + 100]))); views += hits[-1].views
        views += [pool.tensor()[i] for i in range(20000)]
        after = count()
        say(len(views) == 21000, after[0] - before[0], after[1] - before[1] < 50)
    """
    assert said(start(body, uri)).split() == ["True", "0", "True"]


def test_M14_a_file_system_that_cannot_reserve_and_one_that_is_full(under, uri, tmp_path):
    for where in (uri, f"file:{tmp_path}/pool"):
        assert under("'fallocate', errno.EOPNOTSUPP", where=where) == "made True True 10"
        kvpool.remove(where)
        told = under("'fallocate', errno.ENOSPC", where=where)
        assert told.startswith("NoSpace")
        assert "bytes missing" in told
    assert os.listdir(tmp_path) == []
    assert not [name for name in os.listdir("/dev/shm") if uri[4:] in name]


# ---- our own ----


def test_MX1_a_file_system_without_nameless_files(under, tmp_path):
    """The file has a name of its creator's until it is whole; nothing of that stays."""
    told = under(f"'openat', errno.EOPNOTSUPP, 2, {TMPFILE}, {TMPFILE}", where=f"file:{tmp_path}/pool")
    assert told == "made True True 10"
    assert os.listdir(tmp_path) == ["pool"]


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_MX2_limits_of_the_process_are_an_error_not_a_signal(start, uri, limit):
    body = f"""
        import resource
        resource.setrlimit(resource.{limit}, (1 << 30, 1 << 30))
        try:
            kvpool.create(sys.argv[1], "1200MiB", "64KiB"); say("made")
        except (kvpool.NoSpace, kvpool.SystemFailure) as error:
            say("refused", len(str(error)) > 20)
        kvpool.create(sys.argv[1], "1MiB", "4KiB").close(); say("and a small one")
    """
    assert said(start(body, uri)).splitlines() == ["refused True", "and a small one"]
    assert eventually(lambda: kvpool.open(uri).check().clean)
