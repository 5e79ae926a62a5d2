"""Each bad input gets one clear exception that says what to do, and leaves nothing behind."""

import contextlib
import gc
import os
import pathlib
import shutil
import struct
import subprocess

import numpy as np
import pytest
from conftest import eventually, fill

import kvpool
from kvpool.bindings import core

SHM = "/dev/shm"


def left_behind(name):
    return [entry for entry in os.listdir(SHM) if name.removeprefix("shm:") in entry]


# ---- create -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, -4096, "", "x", "4XiB", "1.0000001KiB", 1.5, True, None, 1 << 63, "10%"])
def test_sizes_that_are_none(uri, size):
    with pytest.raises(kvpool.InvalidArgument):
        kvpool.create(uri, size)
    assert not left_behind(uri)


@pytest.mark.parametrize(
    "block", [0, -4096, 1, 100, 4095, 4097, 4 << 30, (16 << 20) + 64, "3KiB", [], ["4KiB", "4KiB"], ["4KiB"] * 9]
)
def test_blocks_that_are_none(uri, block):
    with pytest.raises(kvpool.InvalidArgument):
        kvpool.create(uri, "16MiB", block)
    assert not left_behind(uri)


@pytest.mark.parametrize("block", [4096, 4160, 6400, 368640, 16 << 20])
def test_any_block_size_in_steps_of_64(block, identity):
    with kvpool.create("memfd:", blocks=3, block=block) as pool:
        ns = pool.namespace(identity)
        fill(ns, ns.keys(range(48)), block)
        assert pool.check().clean
        assert pool.block_bytes == (block,)
        with ns.match(ns.keys(range(48))) as hit:
            assert all(view.nbytes == block for view in hit.views)


@pytest.mark.parametrize(
    "options",
    [
        {"size": 1 << 50, "block": "4KiB"},
        {"blocks": 1 << 28, "block": "16MiB"},
        {"size": 4096},
        {"size": "100KiB", "block": "16MiB"},
    ],
)
def test_sizes_that_cannot_be(uri, options):
    with pytest.raises((kvpool.InvalidArgument, kvpool.NoSpace)) as caught:
        kvpool.create(uri, **options)
    assert any(character.isdigit() for character in str(caught.value))
    assert not left_behind(uri)


def test_more_than_the_machine_has_names_the_missing_bytes(uri):
    for where in (uri, "memfd:"):
        with pytest.raises(kvpool.NoSpace, match=r"\d+ bytes missing"):
            kvpool.create(where, "8TiB")
    assert not left_behind(uri)


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "mru"},
        {"workers": 0},
        {"workers": 65},
        {"workers": True},
        {"blocks": 4, "size": 1 << 20},
        {"size": None},
        {"blocks": 0, "size": None},
        {"blocks": -1, "size": None},
        {"blocks": "4", "size": None},
    ],
)
def test_other_options(uri, wrong):
    with pytest.raises(kvpool.InvalidArgument):
        kvpool.create(uri, **({"size": "16MiB"} | wrong))
    assert not left_behind(uri)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "shm:",
        "shm:a/b",
        "shm:.hidden",
        "shm:" + "x" * 300,
        "posix:x",
        "file:",
        "dax:0.0",
        "dax:/tmp/x",
        "memfd:x",
        "memfd:1/x",
        "memfd:/",
        "hugetlb:3MiB",
        "shm:x?color=red",
        "shm:x?mode=9",
        "shm:x?node=64",
        "shm:x?node=",
        "x" * 600,
        "shm:a\0b",
    ],
)
def test_uris_that_are_none(text):
    for call in (lambda: kvpool.create(text, "1MiB"), lambda: kvpool.open(text), lambda: kvpool.remove(text)):
        with pytest.raises((kvpool.InvalidArgument, kvpool.NotFound)):
            call()


def test_not_a_dax_device():
    with pytest.raises(kvpool.InvalidArgument, match="device-dax"):
        kvpool.create("dax:/dev/null", "1MiB")
    with pytest.raises(kvpool.NotFound):
        kvpool.create("dax:/dev/dax99.9", "1MiB")


def test_numa_node_that_is_not_there(uri):
    with pytest.raises(kvpool.InvalidArgument, match="NUMA"):
        kvpool.create(uri + "?node=63", "1MiB")
    assert not left_behind(uri)
    with kvpool.create(uri + "?node=0", "1MiB", "4KiB") as pool:
        assert pool.check().clean


@pytest.mark.racks("sim-2")
def test_the_name_is_taken(make_pool, uri):
    make_pool()
    with pytest.raises(kvpool.Exists, match="rm"):
        kvpool.create(uri, "1MiB")
    with pytest.raises(kvpool.Busy):
        kvpool.create(uri, "1MiB", replace=True)


def test_replace_takes_over_from_the_dead(uri, python):
    for _ in range(3):
        done = python(
            """
            import sys, os, signal, kvpool
            pool = kvpool.create(sys.argv[1], "4MiB", "4KiB", replace=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
            uri,
            check=False,
        )
        assert done.returncode == -9
        assert len(left_behind(uri)) == 1


def test_permissions(make_pool, rack, uri):
    make_pool()
    assert os.stat(rack.path(uri)).st_mode & 0o777 == 0o600
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root to become somebody else")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-c", f"cat {rack.path(uri)}"],
        capture_output=True,
        text=True,
    )
    assert "ermission denied" in done.stderr


def test_another_user_is_refused_with_the_path(make_pool, rack, uri):
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    make_pool()
    path = rack.path(uri)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setuid(65534)
            kvpool.open(f"{uri}?uid=0")
        except kvpool.PermissionDenied as error:
            status = 0 if path in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_small_shm_says_so_and_what_to_do(tmp_path, python):
    """In a container /dev/shm has 64 MiB; here a mount namespace plays the container."""
    if os.getuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root for a mount namespace")
    program = tmp_path / "program.py"
    program.write_text("""
import kvpool
try:
    kvpool.create("shm:big", "128MiB")
    raise SystemExit("created")
except kvpool.NoSpace as error:
    assert "missing" in str(error) and "memfd:" in str(error) and "file:" in str(error), error
with kvpool.create("shm:small", "32MiB") as a, kvpool.create("memfd:", "128MiB") as b:
    assert a.check().clean and b.check().clean
""")
    import sys

    mount = f"mount -t tmpfs -o size=64m none /dev/shm && exec {sys.executable} -P {program}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr and "denied" in done.stderr:
        pytest.skip("mount namespaces are not allowed here")
    assert done.returncode == 0, done.stderr


# ---- images -------------------------------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path, rack, uri, identity):
    """A small whole image in a file, with blocks published, and its URI. In sim: the device, every host reset."""
    where = uri if rack.is_sim else f"file:{tmp_path}/image"

    def make():
        with rack.create_alone(where, blocks=16, workers=4) as pool:
            ns = pool.namespace(identity)
            fill(ns, ns.keys(range(160)))

    make()
    reset(rack, where)
    return pathlib.Path(rack.path(uri)) if rack.is_sim else tmp_path / "image", where


def reset(rack, uri):
    """Simulated hosts remember nothing of an image from now on."""
    if rack.is_sim:
        gc.collect()  # handles of it
    for host in range(rack.hosts if rack.is_sim else 0):
        with contextlib.suppress(kvpool.NotFound):
            core("sim").check(core("sim").lib.kvp_pool_lose_host(uri.encode(), host))


def patch(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_foreign_file(tmp_path):
    (tmp_path / "x").write_bytes(b"not a pool" * 1000)
    with pytest.raises(kvpool.Foreign):
        kvpool.open(f"file:{tmp_path}/x")
    with pytest.raises(kvpool.Foreign):
        kvpool.remove(f"file:{tmp_path}/x")
    assert (tmp_path / "x").exists()
    kvpool.remove(f"file:{tmp_path}/x", force=True)
    assert not (tmp_path / "x").exists()


def test_nothing_there(uri, tmp_path):
    for text in (uri, f"file:{tmp_path}/none", "memfd:999999999/3", "memfd:9999"):
        with pytest.raises((kvpool.NotFound, kvpool.SystemFailure)):
            kvpool.open(text)
    with pytest.raises(kvpool.NotFound):
        kvpool.remove(uri)


def test_a_folder_is_no_pool(tmp_path):
    with pytest.raises(kvpool.Error):
        kvpool.open(f"file:{tmp_path}")


@pytest.mark.racks("sim-1")
@pytest.mark.parametrize(
    ("version", "error", "code"),
    [
        (0, kvpool.NotReady, -10),
        (1, kvpool.VersionMismatch, -12),
        (2, kvpool.VersionMismatch, -12),
        (4, kvpool.VersionMismatch, -13),
    ],
)
def test_other_versions(image, version, error, code):
    path, uri = image
    patch(path, 8, struct.pack("<Q", version))
    with pytest.raises(error) as caught:
        kvpool.open(uri)
    assert caught.value.code == code


def test_cut_short(image):
    path, uri = image
    whole = path.read_bytes()
    for length in (len(whole) - 4096, len(whole) // 2, 8192, 4096, 4095, 100, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(kvpool.Truncated):
            kvpool.open(uri)


@pytest.mark.racks("sim-1")
def test_every_flipped_bit_of_the_superblock_is_refused_or_harmless(image, rack):
    path, uri = image
    whole = path.read_bytes()
    for bit in range(0, 8 * 728, 11 if rack.is_sim else 1):
        patch(path, bit // 8, bytes([whole[bit // 8] ^ 1 << bit % 8]))
        with pytest.raises((kvpool.Corrupt, kvpool.Foreign, kvpool.VersionMismatch, kvpool.NotReady)):
            kvpool.open(uri)
        patch(path, bit // 8, whole[bit // 8 : bit // 8 + 1])
    kvpool.open(uri).close()


def metadata_bytes(uri):
    with kvpool.open(uri) as pool:
        return pool.info["payload_offset"]


def use(uri, identity):
    """Every kind of call on a pool; was it clean?"""
    with kvpool.open(uri) as pool:
        is_clean = pool.check().clean
        ns = pool.namespace(identity)
        ns.match(ns.keys(range(160))).release()
        ns.get_into(ns.keys(range(160)), np.zeros((10, 4096), np.uint8))
        pool.evict(4)
        pool.events().poll()
        pool.stats()
        pool.follow()
        pool.hosts()
        fill(ns, ns.keys(range(500, 532)))
        return is_clean


@pytest.mark.racks("sim-4")  # where most of the metadata is what hosts tell each other
def test_damage_anywhere_is_found_or_harmless(image, rack, identity):
    """Random bytes over the metadata: no crash, and check names it or every answer is right."""
    path, uri = image
    whole = path.read_bytes()
    rng = np.random.default_rng(7)
    end = metadata_bytes(uri)
    reset(rack, uri)
    found = 0
    for _ in range(80 if rack.is_sim else 300):
        offset = int(rng.integers(1024, end))
        patch(path, offset, rng.bytes(8))
        try:
            found += not use(uri, identity)
        except kvpool.Error:
            found += 1
        reset(rack, uri)
        path.write_bytes(whole)
    assert rack.is_sim or found > 20  # a host that starts undoes what makes no sense


def notices_removal(pool):
    """At once; where there are several hosts, at its next tick."""
    try:
        return pool.check() and False
    except kvpool.Replaced:
        return True


@pytest.mark.racks("sim-2")
def test_re_created_under_the_same_name(make_pool, identity, rack, uri):
    old = make_pool()
    ns = old.namespace(identity)
    keys = ns.keys(range(160))
    fill(ns, keys)
    hit = ns.match(keys)
    kvpool.remove(uri, force=True)
    assert eventually(lambda: notices_removal(old))
    with rack.create_alone(uri, blocks=64) as new:
        for call in (
            lambda: ns.match(keys),
            lambda: ns.reserve(keys),
            lambda: ns.contains(keys),
            lambda: old.evict(1),
            lambda: old.check(),
            lambda: ns.get_into(keys, np.zeros((10, 4096), np.uint8)),
            lambda: ns.put(keys, np.zeros((10, 4096), np.uint8)),
        ):
            with pytest.raises(kvpool.Replaced, match="open the pool again"):
                call()
        assert int(hit.views[0][0]) >= 0
        hit.release()
        assert not new.namespace(identity).contains(keys).any()


# ---- handles ------------------------------------------------------------------------------------------------------


@pytest.mark.racks("sim-2")
def test_a_key_of_the_wrong_length(ns):
    for wrong in (b"x" * 15, b"x" * 17, [b"x" * 16, b"y" * 8], [b""], memoryview(b"x" * 32)[::2]):
        with pytest.raises(kvpool.InvalidArgument, match="16 bytes"):
            ns.match(wrong)
    with pytest.raises(kvpool.InvalidArgument, match="all zeros"), ns.reserve(bytes(16)) as new:
        new.publish()


@pytest.mark.racks("sim-2")
def test_references_that_name_nothing(pool, ns, rack):
    keys = ns.keys(range(160))
    fill(ns, keys)
    good = int(ns.lookup(keys)[0])
    for ref in (rack.whole(64), (1 << 29) - 1, 1 << 29, 7 << 29, good | 1 << 29):
        with pytest.raises(kvpool.OutOfRange):
            pool.pin([ref])
    for ref in (0, good & 0xFFFFFFFF, good ^ 1 << 32, good ^ 1 << 61, good | 1 << 62, good | 1 << 63):
        with pytest.raises((kvpool.Stale, kvpool.OutOfRange)):
            pool.pin([ref])
    for wrong in ([-1], [1 << 64], ["x"], [[good]]):
        with pytest.raises(kvpool.InvalidArgument):
            pool.pin(wrong)
    assert pool.check().pins == 0


@pytest.mark.racks("sim-2")
def test_classes_that_are_not_there(pool, identity):
    for wrong in (1, -1, 8):
        for call in (
            lambda c=wrong: pool.namespace(identity, block_class=c),
            lambda c=wrong: pool.tensor(c),
            lambda c=wrong: pool.evict(1, c),
        ):
            with pytest.raises(kvpool.OutOfRange, match="does not exist"):
                call()


def test_shapes_that_do_not_fit(pool):
    for dtype, shape in ((np.uint8, (4097,)), (np.float32, (1025,)), (np.float32, (0,)), (np.uint8, (-1,))):
        with pytest.raises((kvpool.InvalidArgument, ValueError)):
            pool.tensor(0, dtype, shape)


@pytest.mark.racks("sim-2")
def test_double_publish_and_publish_after_withdraw(pool, ns):
    keys = ns.keys(range(160))
    with ns.reserve(keys) as new:
        new.publish()
        with pytest.raises(kvpool.NotOwned):
            new.publish()
        new.withdraw()
    with ns.reserve(ns.keys(range(9, 169))) as other:
        other.withdraw()
        other.withdraw()
        with pytest.raises(kvpool.NotOwned):
            other.publish()
        with pytest.raises((kvpool.NotOwned, kvpool.OutOfRange)):
            other.fill(0, b"x")
    assert ns.contains(keys).all()
    assert pool.check().clean


@pytest.mark.racks("sim-2")
def test_after_close(make_pool, identity):
    pool = make_pool()
    ns = pool.namespace(identity)
    keys = ns.keys(range(160))
    new = ns.reserve(keys)
    view = new.views[0]
    pool.close()
    pool.close()
    for call in (
        lambda: ns.match(keys),
        lambda: ns.reserve(keys),
        new.publish,
        lambda: pool.evict(1),
        pool.check,
        lambda: ns.remove(keys),
    ):
        with pytest.raises(kvpool.Closed):
            call()
    view[0]
    new.withdraw()


def test_two_threads_and_one_reservation(ns):
    import threading

    caught = []
    with ns.reserve(ns.keys(range(160))) as new:

        def use():
            for call in (new.publish, new.withdraw, lambda: new.views, lambda: new.fill(0, b"x")):
                try:
                    call()
                except kvpool.WrongThread as error:
                    caught.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert len(caught) == 4
        assert new.publish() == 10


@pytest.mark.racks("sim-2")
def test_after_fork(pool, ns):
    keys = ns.keys(range(160))
    fill(ns, keys)
    hit = ns.match(keys)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (
                lambda: ns.match(keys),
                lambda: ns.reserve(keys),
                lambda: pool.evict(1),
                pool.check,
                lambda: pool.events().poll(),
            ):
                try:
                    call()
                    os._exit(2)
                except kvpool.Forked:
                    pass
            hit.release()
            pool.close()
            del hit
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.evict(64) == 0
    hit.release()
    assert pool.check().clean


@pytest.mark.racks("sim-2")
def test_buffers_that_do_not_fit(ns):
    keys = ns.keys(range(32))
    for wrong in ([bytes(4096)], [bytes(4097)] * 2, [bytes(10), bytes(11)], ["text"] * 2, [None, None], [1, 2]):
        with pytest.raises(kvpool.InvalidArgument):
            ns.put(keys, wrong)
    for wrong in ([bytes(10)] * 2, [bytearray(4097), bytearray(4097)], [np.zeros(20, np.uint8)[::2]] * 2):
        with pytest.raises(kvpool.InvalidArgument):
            ns.get_into(keys, wrong)
    assert not ns.contains(keys).any()


@pytest.mark.racks("sim-2")
def test_every_slot_taken(make_pool, uri):
    make_pool(workers=2)
    with kvpool.open(uri) as second:
        with pytest.raises(kvpool.NoSlot, match="all 2 worker slots"):
            kvpool.open(uri)
        second.close()
        kvpool.open(uri).close()


@pytest.mark.racks("sim-2")
def test_pins_run_out(make_pool, identity):
    pool = make_pool(blocks=4096)
    ns = pool.namespace(identity)
    slots = pool.info["pin_slots"]
    keys = ns.keys(range(16 * (slots + 8)))
    ns.put(keys, [b"x"] * len(keys))
    with ns.match(keys) as hit:
        assert len(hit) == slots
        with pytest.raises(kvpool.NoPins, match="release hits"):
            pool.pin(ns.lookup(keys[slots:]))
    assert len(ns.match(keys[slots:])) == 8
    assert eventually(lambda: pool.check().pins == 0)


def test_errors_are_one_family():
    classes = {value for value in vars(kvpool).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert len(classes) > 20
    assert all(issubclass(each, kvpool.Error) for each in classes)
    codes = [each.code for each in classes if each is not kvpool.Error]
    assert len(set(codes)) == len(codes)
    assert all(code < 0 for code in codes)


@pytest.mark.racks("sim-1")
def test_force_removes_what_is_cut_short(image):
    path, uri = image
    path.write_bytes(path.read_bytes()[:10000])
    with pytest.raises((kvpool.Truncated, kvpool.Foreign)):
        kvpool.open(uri)
    kvpool.remove(uri, force=True)
    assert not path.exists()
