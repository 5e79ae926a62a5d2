"""What hits share and keep: views, references, holds; and the paths of one block, which are the most used."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from conftest import fill, payload

import kvpool
from kvpool import handles


@pytest.mark.parametrize("most", [1 << 16, 4])
def test_views_show_their_blocks_whatever_way_they_are_made(pool, ns, monkeypatch, most):
    """One and several, held and released, of a class with more blocks than views are kept for."""
    monkeypatch.setattr(handles, "_ROWS_MAX", most)
    keys = ns.keys(range(16 * 12))
    fill(ns, keys)
    wanted = [bytes(payload(key)) for key in keys]
    for _ in range(2):
        many, ones = ns.match(keys), [ns.match([key]) for key in keys]
        pinned = pool.pin(many.refs)
        for _ in range(2):
            for hit in (many, pinned):
                assert [bytes(view) for view in hit.views] == wanted
            assert [bytes(hit.views[0]) for hit in ones] == wanted
            assert [int(hit.refs[0]) for hit in ones] == many.refs.tolist() == pinned.refs.tolist()
            assert [int(hit.blocks[0]) for hit in ones] == many.blocks.tolist()
            assert not many.views[3].flags.writeable
            for hit in (many, pinned, *ones):
                hit.release()  # the second time round they show what they did
    assert pool.check().pins == 0


def test_views_that_are_kept_are_as_many_as_the_blocks_allow(make_pool, identity):
    """A reference is new for ever: what is kept of them does not grow with each publication."""
    pool = make_pool(blocks=4)
    ns = pool.namespace(identity)
    for number in range(50):
        key = ns.named([str(number)])
        fill(ns, key)
        with ns.match(key) as hit:
            assert bytes(hit.views[0]) == bytes(payload(key[0]))
    assert len(pool.shelves[0][0].rows.seen) <= 16


def test_holds_that_wait_for_the_next_hit_are_few(pool, ns):
    keys = ns.keys(range(16))
    fill(ns, keys)
    for _ in range(2):
        hits = [ns.match(keys) for _ in range(200)]
        assert pool.check().pins == 1
        for hit in hits:
            hit.release()
        assert pool.check().pins == 0


@pytest.mark.parametrize("count", [1, 3])
def test_of_many_threads_one_releases(pool, ns, count):
    """Who comes late gives nobody else's pins back, though the hold is used again at once."""
    keys = ns.keys(range(16 * count))
    fill(ns, keys)
    for _ in range(200):
        hit = ns.match(keys)
        refs, start = hit.refs.tolist(), threading.Barrier(3)

        def release(hit=hit, refs=refs, start=start):
            start.wait()
            hit.release()
            with ns.match(keys) as mine:
                assert mine.refs.tolist() == hit.refs.tolist() == refs

        others = [threading.Thread(target=release) for _ in range(2)]
        for other in others:
            other.start()
        release()
        for other in others:
            other.join()
        assert pool.check().pins == 0


def test_one_buffer_is_checked_as_many_are(ns):
    keys = ns.keys(range(16))
    page = np.full(4096, 7, np.uint8)
    for wrong in ([], [page, page], 7, None, [7], [np.zeros(0, np.uint8)], [page[::2]], [np.zeros(8192, np.uint8)]):
        with pytest.raises(kvpool.InvalidArgument):
            ns.put(keys, wrong)
        with pytest.raises(kvpool.InvalidArgument):
            ns.get_into(keys, wrong)
    out = np.zeros(4096, np.uint8)
    with pytest.raises(kvpool.InvalidArgument, match="writable"):
        ns.get_into(keys, [bytes(out)])
    assert ns.get_into(keys, [out]).tolist() == [False]
    for buffers in ([page], (page,), page.reshape(1, 4096), [memoryview(page)], [bytes(page)]):
        assert ns.put(keys, buffers) == 1
        assert ns.put(keys, buffers) == 0
        got = ns.get_into(bytes(keys[0]), [out])
        assert (out == 7).all()
        assert got.tolist() == [True]
        got[0] = False  # it is the caller's own
        out[:] = 0
        assert ns.remove(keys) == 1
