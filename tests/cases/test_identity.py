"""Cases of keys and identity: a key is the whole truth, the same everywhere, and what was reused is not what it was."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from conftest import fill, payload, said

import kvpool
from kvpool.bindings.lmcache import PoolClient

TELL = """
import sys, kvpool
i = kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16", {fields})
with kvpool.create("memfd:", blocks=8, block="4KiB") as pool:
    ns = pool.namespace(i, "a")
    print(bytes(ns.keys(range(48)).array).hex(), bytes(ns.named(["x", b"y"]).array).hex())
"""


@pytest.fixture
def of(pool, identity):
    """Keys of the first 160 tokens, by what differs in the identity."""

    def keys(tenant="", **fields):
        return set(pool.namespace(dataclasses.replace(identity, **fields), tenant).keys(range(160)))

    return keys


def test_K01_every_process_derives_the_same_keys(python, monkeypatch):
    told = set()
    for seed in (None, "0", "7", "random"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False) if seed is None else monkeypatch.setenv(
            "PYTHONHASHSEED", seed
        )
        told.add(python(TELL.format(fields="")).stdout)
    assert len(told) == 1


def test_K01_hashes_that_are_not_portable_are_refused_at_start(pool, uri, monkeypatch):
    stated = {"revision": "1", "dtype": "bfloat16", "chunk_tokens": 256}
    for seed in (None, "random"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False) if seed is None else monkeypatch.setenv(
            "PYTHONHASHSEED", seed
        )
        with pytest.raises(kvpool.InvalidArgument, match="PYTHONHASHSEED"):
            PoolClient(uri, **stated, hash_algorithm="builtin")
    PoolClient(uri, **stated, hash_algorithm="sha256_cbor").close()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    PoolClient(uri, **stated, hash_algorithm="builtin").close()


ABSENT = ["", "adapter=None", 'adapter=""', "extra=()", "extra=[]", "rank=(0, 1)", "rank=[0, 1]", "block_tokens=16"]
PRESENT = ['adapter="None"', 'adapter="0"', 'adapter="False"', 'isa="None"', 'extra=(("adapter", ""),)']


def test_K02_absent_fields_are_one_class_and_present_ones_are_not(python):
    programs = "".join(TELL.format(fields=fields) for fields in ABSENT + PRESENT)
    told = [python(programs).stdout.splitlines() for _ in range(3)]
    assert told[0] == told[1] == told[2]
    absent, present = told[0][: len(ABSENT)], told[0][len(ABSENT) :]
    assert len({*absent}) == 1
    assert len({*present, *absent}) == len(PRESENT) + 1


def test_K02_equal_identities_make_equal_keys():
    stated = {"model": "m", "revision": "1", "dtype": "f", "layout": "l"}
    forms = [
        kvpool.Identity(**stated, rank=rank, block_tokens=tokens, extra=extra)
        for rank in ((1, 2), [1, 2], (np.int64(1), np.uint8(2)))
        for tokens in (16, np.int32(16))
        for extra in ((("a", "1"), ("b", "2")), [["b", "2"], ["a", "1"]])
    ]
    assert len(set(forms)) == len({form.canonical() for form in forms}) == 1


def test_K04_an_adapter_and_its_version_are_part_of_the_key(pool, ns, identity):
    adapted = pool.namespace(dataclasses.replace(identity, adapter="a@1"))
    fill(adapted, adapted.keys(range(160)))
    for other in (None, "b@1", "a@2", "a"):
        stranger = pool.namespace(dataclasses.replace(identity, adapter=other))
        assert not stranger.contains(stranger.keys(range(160))).any()
    again = pool.namespace(dataclasses.replace(identity, adapter="a@1"))
    assert again.contains(again.keys(range(160))).all()


def test_K05_a_dtype_is_part_of_the_key_by_every_way(pool, uri, of):
    dtypes = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8+scales")
    assert len(set.union(*(of(dtype=dtype) for dtype in dtypes))) == 40
    clients = [PoolClient(uri, revision="1", dtype=dtype, chunk_tokens=16) for dtype in dtypes]
    numbers = [clients[0].submit_batch_set(["k"], [b"x" * 100])]
    while not (done := clients[0].drain_completions()):
        pass
    assert done[0][0] == numbers[0]
    found = []
    for client in clients:
        client.submit_batch_exists(["k"])
        while not (done := client.drain_completions()):
            pass
        found += done[0][3]
        client.close()
    assert found == [True, False, False, False]


def test_K06_weights_are_named_by_what_they_are_not_how_they_are_called(of):
    settings = [
        {},
        {"revision": "2"},
        {"dtype": "int4"},
        {"layout": "plain/16+rope=1e6"},
        {"extra": (("rope", "yarn"),)},
        {"extra": (("quantization", "awq"),)},
    ]
    assert len(set.union(*(of(**each) for each in settings))) == 10 * len(settings)
    assert of(model="another name") != of()
    assert of(model="test", revision="fingerprint") == of(model="test", revision="fingerprint")


def test_K07_pictures_with_the_same_tokens_are_told_apart(pool, ns):
    """An engine's hash of block and picture is the name; one bit of it, wherever it is, makes another key."""
    rng = random.Random(7)
    names = {bytes(rng.randbytes(32)) for _ in range(2000)}
    for name in list(names)[:200]:
        for bit in (0, 7, 15, 16, 127, 128, 248, 255):
            flipped = bytearray(name)
            flipped[bit // 8] ^= 1 << bit % 8
            names.add(bytes(flipped))
    listed = sorted(names)
    keys = ns.named(listed)
    assert len(set(keys)) == len(listed)
    assert set(keys) == set(ns.named([bytes(name) for name in reversed(listed)]))
    for order in ([b"a", b"b"], [b"b", b"a"]):
        assert ns.named(order)[0] == ns.named(order[:1])[0]
    with pytest.raises(kvpool.InvalidArgument):  # without a hash a block has no name, and is not shared
        ns.named([None])


def test_K08_keys_that_begin_alike_are_compared_whole(pool, ns):
    """The directory looks by a part of the key; here that part collides, for every other key."""
    rng = random.Random(8)
    start = rng.randbytes(8)
    keys = [start + rng.randbytes(8) for _ in range(8)] + [rng.randbytes(8) + start for _ in range(8)]
    near = [bytes([*key[:15], key[15] ^ 1]) for key in keys] + [bytes([key[0] ^ 1, *key[1:]]) for key in keys]
    data = [np.full(4096, i, np.uint8) for i in range(16)]
    stored = [ns.put([key], [each]) for key, each in zip(keys, data, strict=True)]
    assert sum(stored) >= 8
    out = np.full((1, 4096), 255, np.uint8)
    for key, each, was in zip(keys, data, stored, strict=True):
        got = ns.get_into([key], out)[0]
        assert got <= bool(was)
        assert not got or np.array_equal(out[0], each)
    assert not ns.contains(near).any()
    assert all(len(ns.match([key])) == 0 for key in near)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_K09_who_asks_and_who_stores_make_one_key(pool, identity, ranks):
    def of_rank(rank):
        return pool.namespace(dataclasses.replace(identity, rank=(rank, ranks)))

    keys = [of_rank(rank).keys(range(64)) for rank in range(ranks)]
    for rank in range(ranks):  # the workers
        fill(of_rank(rank), keys[rank])
    for rank in range(ranks):  # the scheduler, which makes them by itself, in parts
        asks = of_rank(rank)
        first = asks.keys(range(16))
        assert asks.keys(range(16, 64), after=first) == keys[rank][1:]
        assert asks.contains(keys[rank]).all()
    assert len({key for each in keys for key in each}) == 4 * ranks


def test_K10_clients_of_one_second_do_not_write_over_each_other(make_pool, uri, start, identity):
    pool = make_pool(blocks=1024)
    body = """
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity, "of all")
        say("ready"); sys.stdin.readline()
        for i in range(100):
            keys = ns.named([f"{sys.argv[2]}/{i}"])
            fill(ns, keys)
        say("done")
    """
    clients = [start(body, uri, number) for number in range(8)]
    assert [each.stdout.readline() for each in clients] == ["ready\n"] * 8
    for each in clients:
        each.stdin.write("\n")
        each.stdin.flush()
    assert [said(each) for each in clients] == ["done\n"] * 8
    ns = pool.namespace(identity, "of all")
    names = [f"{number}/{i}" for number in range(8) for i in range(100)]
    keys = ns.named(names)
    with ns.match(keys) as hit:
        assert len(hit) == 800
        assert all(np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=True))


def test_K12_golden_keys_are_those_of_every_way_in(pool, python):
    """Keys of tokens, of names, of a C program's view (the raw key), and in the event log are the same bytes."""
    golden = dict(line.split() for line in (Path(__file__).parent / "golden_keys.txt").read_text().splitlines())
    identity = kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16")
    told = {}
    for adapter in ("", "lora@2"):
        for tenant in ("", "salt"):
            for tokens in (16, 32):
                one = dataclasses.replace(identity, adapter=adapter, block_tokens=tokens)
                ns = pool.namespace(one, tenant)
                what = f"{adapter or '-'}/{tenant or '-'}/{tokens}"
                told[f"{what}/tokens"] = ns.keys(range(tokens * 3))[2].hex()
                told[f"{what}/name"] = ns.named(["prefix/picture=1"])[0].hex()
                ns.put(ns.keys(range(tokens * 3)), np.zeros((3, 4096), np.uint8))
    assert told == golden
    published = {event.key.hex() for event in pool.events().poll() if event.kind == "published"}
    assert {key for what, key in golden.items() if what.endswith("tokens")} <= published


@pytest.mark.parametrize("verb", ["match", "lookup", "get_into", "put", "reserve", "remove", "pin", "evict"])
def test_K13_a_pool_that_was_made_anew_is_not_the_old_one(make_pool, uri, identity, verb):
    pool = make_pool()
    ns = pool.namespace(identity)
    keys = ns.keys(range(160))
    fill(ns, keys)
    refs, out = ns.lookup(keys), np.full((10, 4096), 9, np.uint8)
    kvpool.remove(uri, force=True)
    with kvpool.create(uri, blocks=64, block="4KiB") as anew:
        fill(anew.namespace(identity), keys)
        before = anew.stats()["published"], anew.check().blocks
        calls = {
            "get_into": lambda: ns.get_into(keys, out),
            "put": lambda: ns.put(ns.keys(range(7, 39)), out[:2]),
            "reserve": lambda: ns.reserve(4),
            "pin": lambda: pool.pin(refs),
            "evict": lambda: pool.evict(5),
        }
        with pytest.raises(kvpool.Replaced):
            calls.get(verb, lambda: getattr(ns, verb)(keys))()
        assert (anew.stats()["published"], anew.check().blocks) == before
        assert (out == 9).all()


def test_K14_names_of_any_form_are_found_after_a_restart(tmp_path, python, identity):
    names = [
        "-1",
        "a.b",
        "a@b@-7@x.y",
        "a@b@-7@x.z",
        "a@b",
        "a",
        "0",
        "-0",
        " ",
        "é",
        "\n",
        "x" * 100000,
        "%2F",
        "../up",
        "\x00",
        b"\xff\x00",
    ]
    names += [f"{-i}.{i}@{'.' * i}" for i in range(30)]
    path = f"file:{tmp_path}/pool"
    python(
        """
        import os, signal, sys, numpy as np, kvpool
        pool = kvpool.create(sys.argv[1], blocks=64, block="4KiB")
        ns = pool.namespace(kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16"))
        names = eval(sys.stdin.read())
        for i, name in enumerate(names):
            ns.put(ns.named([name]), np.full((1, 4096), i, np.uint8))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
        input=repr(names),
        check=False,
    )
    with kvpool.open(path) as pool:
        ns = pool.namespace(identity)
        out = np.zeros((len(names), 4096), np.uint8)
        assert ns.get_into(ns.named(names), out).all()
        assert out[:, 0].tolist() == list(range(len(names)))
        assert pool.check().entries == len(names)


def test_K15_two_openers_of_a_file_share_one_allocator(tmp_path, identity, start):
    path = f"file:{tmp_path}/device"
    with kvpool.create(path, blocks=512, block="4KiB") as pool:
        with pytest.raises(kvpool.Exists):  # nobody makes a second pool of his own there
            kvpool.create(path, blocks=512, block="4KiB")
        with pytest.raises(kvpool.Busy):
            kvpool.create(path, blocks=512, block="4KiB", replace=True)
        ns = pool.namespace(identity)
        body = """
            pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity)
            for i in range(200): fill(ns, ns.named([f"there/{i}"]))
            say("done"); sys.stdin.readline()
        """
        other = start(body, path)
        for i in range(200):
            fill(ns, ns.named([f"here/{i}"]))
        assert other.stdout.readline() == "done\n"
        keys = ns.named([f"{where}/{i}" for where in ("here", "there") for i in range(200)])
        with ns.match(keys) as hit:
            assert len(set(hit.blocks.tolist())) == 400
            assert all(np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=True))


# ---- our own ----


def test_KX1_a_reference_kept_through_many_lives_of_a_block_stays_stale(make_pool, identity):
    """Generations: the same number, reused a thousand times, is never taken for what it was."""
    pool = make_pool(blocks=8)
    ns = pool.namespace(identity)
    kept = []
    for i in range(1000):
        keys = ns.named([f"life/{i}"])
        fill(ns, keys)
        kept.append(int(ns.lookup(keys)[0]))
        ns.remove(keys)
    assert len(set(kept)) == 1000
    fill(ns, ns.named([f"other/{i}" for i in range(8)]))
    for ref in kept:
        with pytest.raises(kvpool.Stale):
            pool.pin([ref])


def test_KX2_a_chain_told_in_parts_covers_what_was_before_it(pool, ns):
    """Equal parts behind unlike prefixes are unlike keys, and a part cut out of a chain cannot be gone on with."""
    one, two = ns.keys([1] * 16), ns.keys([2] * 16)
    assert ns.keys(range(64), after=one) != ns.keys(range(64), after=two)
    assert ns.keys(range(64), after=one)[3] != ns.keys(range(64))[3]
    with pytest.raises(kvpool.InvalidArgument, match="whole"):
        ns.keys(range(16), after=ns.keys(range(64))[:2])
    assert len(set(ns.keys([5] * 160))) == 10  # equal blocks at other places
