"""Keys: total, portable, chained."""

import array
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool
from kvpool.keys import KeyMaker

GOLDEN = {
    "": "ed36fcf84e3751fa5d346397abd3e55d",
    "a": "2b7986ba0571e1127f2be11a80103162",
}


def keys_of(identity, tokens, tenant=""):
    from kvpool.keys import KeyMaker

    return KeyMaker(identity, tenant).keys(tokens, None)


def test_golden_vectors_never_change(identity):
    for tenant, expected in GOLDEN.items():
        assert keys_of(identity, np.arange(160), tenant)[9].hex() == expected


def test_every_process_derives_the_same(identity, python, monkeypatch):
    for seed in ("0", "1", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        done = python("""
            import kvpool
            from kvpool.keys import KeyMaker
            i = kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16")
            print(KeyMaker(i, "a").keys(range(160), None)[9].hex())
        """)
        assert done.stdout.strip() == GOLDEN["a"]


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        np.array,
        lambda t: np.array(t, np.int64),
        lambda t: np.array(t, np.uint16),
        lambda t: array.array("i", t),
        lambda t: memoryview(array.array("q", t)),
    ],
)
def test_any_integer_buffer(identity, form):
    assert keys_of(identity, form(range(48))) == keys_of(identity, np.arange(48, dtype=np.uint32))


@pytest.mark.parametrize("tokens", [[-1] * 16, [1 << 32] * 16, [1.5] * 16, [[1] * 16], "text", None])
def test_bad_tokens(identity, tokens):
    with pytest.raises(kvpool.InvalidArgument, match="token ids"):
        keys_of(identity, tokens)


def test_a_rest_has_no_key(identity):
    assert [len(keys_of(identity, range(n))) for n in (0, 1, 15, 16, 31, 32)] == [0, 0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 1 << 32 - 1), min_size=16, max_size=400), st.integers(0, 24))
def test_a_chain_can_be_made_in_parts(tokens, split):
    identity = kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16")
    whole = keys_of(identity, tokens)
    from kvpool.keys import KeyMaker

    maker = KeyMaker(identity, "")
    first = maker.keys(tokens[: split * 16], None)
    assert first + maker.keys(tokens[split * 16 :], first) == whole


def test_only_the_end_of_a_chain_can_be_extended(identity):
    from kvpool.keys import KeyMaker

    maker = KeyMaker(identity, "")
    keys = maker.keys(range(64), None)
    assert maker.keys(range(16), keys[1:])[0] == maker.keys([*range(64), *range(16)], None)[4]
    with pytest.raises(kvpool.InvalidArgument, match="end before"):
        maker.keys(range(16), keys[:2])


def test_a_key_covers_everything_before_it(identity):
    tokens = np.arange(320)
    base = keys_of(identity, tokens)
    for position in (0, 15, 16, 100, 319):
        changed = tokens.copy()
        changed[position] += 1
        other = keys_of(identity, changed)
        block = position // 16
        assert other[:block] == base[:block]
        assert not set(other[block:]) & set(base)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(kvpool.Identity)])
def test_identity_is_total(identity, field):
    other = {"rank": (1, 2), "block_tokens": 32, "extra": (("rope", "scaled"),)}.get(field, "other")
    changed = dataclasses.replace(identity, **{field: other})
    assert not set(keys_of(identity, range(320))) & set(keys_of(changed, range(320)))


def test_absent_is_absent_and_nothing_else(identity):
    base = keys_of(identity, range(16))
    for absent in (None, ""):
        assert keys_of(dataclasses.replace(identity, adapter=absent), range(16)) == base
    for present in ("0", "None", " "):
        assert keys_of(dataclasses.replace(identity, adapter=present), range(16)) != base
    assert keys_of(dataclasses.replace(identity, adapter="a", isa="b"), range(16)) != keys_of(
        dataclasses.replace(identity, adapter="b", isa="a"), range(16)
    )


def test_tenants_share_nothing(identity):
    assert not set(keys_of(identity, range(160), "a")) & set(keys_of(identity, range(160), "b"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"revision": None},
        {"rank": (2, 2)},
        {"rank": (-1, 1)},
        {"block_tokens": 0},
        {"block_tokens": 2000},
    ],
)
def test_bad_identity(identity, wrong):
    with pytest.raises(kvpool.InvalidArgument, match="Identity"):
        dataclasses.replace(identity, **wrong)


def test_no_keys_collide(identity):
    seen = set()
    for start in range(200):
        seen.update(keys_of(identity, np.arange(start, start + 16 * 500)))
    assert len(seen) == 200 * 500


def test_groups_of_eight_share_a_hint(identity):
    hints = [key[:4] for key in keys_of(identity, range(16 * 24))]
    assert [hints[i] == hints[i - 1] for i in range(1, 24)] == [i % 8 != 0 for i in range(1, 24)]


def test_names_are_bound_as_tokens_are(identity):
    maker = KeyMaker(identity, "a")
    keys = maker.named(["one", b"two", "one"])
    assert keys[0] == keys[2] != keys[1]
    assert keys.chain is None
    others = [KeyMaker(identity, "b"), KeyMaker(dataclasses.replace(identity, revision="2"), "a")]
    assert not {key for maker in others for key in maker.named(["one", "two"])} & set(keys)
    assert len(maker.named([])) == 0
