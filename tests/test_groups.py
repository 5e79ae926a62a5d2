"""Keys that share their homes in the directory: found by their whole selves, wherever their entries stand."""

import pytest
from conftest import fill, payload

pytestmark = pytest.mark.racks("sim-1", "sim-2", "sim-4")


def group_of(tag_of, rest):
    """Eight raw keys that share their homes: the first 4 bytes; `tag_of` gives the last 8, which entries hold."""
    return [b"kvpg" + rest.to_bytes(2, "little") + bytes([i, 0]) + tag_of(i).to_bytes(8, "little") for i in range(8)]


def test_the_whole_key_is_compared(ns):
    """Keys whose entries would be the same, all of a group or one of it: nobody reads another's block."""
    keys, others = group_of(lambda i: i + 1, 1), group_of(lambda i: i + 1, 2)
    fill(ns, keys)
    assert not ns.contains(others).any()
    assert not ns.match(others)
    mixed = [*keys[:3], others[3], *keys[4:]]
    assert ns.contains(mixed).tolist() == [True] * 3 + [False] + [True] * 4
    with ns.match(mixed) as hit:
        assert len(hit) == 3
    fill(ns, others)
    for each in (keys, others):
        with ns.match(each) as hit:
            assert [view.tobytes() for view in hit.views] == [payload(key).tobytes() for key in each]


@pytest.mark.parametrize("removed", [[0], [3], [7], [0, 1], [2, 5]])
def test_a_group_with_holes(ns, removed):
    """What is found of a group does not hang on where its entries and blocks stand."""
    keys = group_of(lambda i: 1000 + i, 3)
    fill(ns, keys)
    there = [i not in removed for i in range(8)]
    assert ns.remove([keys[i] for i in removed]) == len(removed)
    assert ns.contains(keys).tolist() == there
    other = group_of(lambda i: 2000 + i, 4)
    fill(ns, other)  # some of it stands in the holes
    assert ns.contains(keys).tolist() == there
    assert ns.contains(other).all()
    fill(ns, [keys[i] for i in removed])
    for each in (keys, other):
        with ns.match(each) as hit:
            assert [view.tobytes() for view in hit.views] == [payload(key).tobytes() for key in each]
    assert ns.pool.check().clean
