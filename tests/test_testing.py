"""kvpool.testing: what is recorded survives, what is linearizable is found to be, and what is not, is shown."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.testing import (
    UNKNOWN,
    CacheModel,
    Deadlock,
    History,
    Model,
    Operation,
    PoolModel,
    RegisterModel,
    SearchLimit,
    Turns,
    linearizable,
    read_history,
    write_history,
)

fork = multiprocessing.get_context("fork")


def write(call, end, value, **options):
    return Operation(options.get("worker", "w"), "write", options.get("key", "k"), value, call, end)


def read(call, end, value, **options):
    return Operation(options.get("worker", "r"), "read", options.get("key", "k"), None, call, end, value)


# The checker ----------------------------------------------------------------------------------------------------------

GOOD = {
    "nothing": [],
    "one after the other": [write(0, 1, "a"), read(2, 3, "a"), write(4, 5, "b"), read(6, 7, "b")],
    "a read may see a write in progress": [write(0, 9, "a"), read(1, 2, None), read(3, 4, "a")],
    "two writes in progress take either order": [write(0, 9, "a"), write(0, 9, "b"), read(10, 11, "a")],
    "a pending write may have taken effect": [write(0, None, "a"), read(5, 6, "a")],
    "or not": [write(0, None, "a"), read(5, 6, None), read(7, 8, None)],
    "or late": [write(0, None, "a"), read(5, 6, None), read(7, 8, "a")],
    "a pending read says nothing": [write(0, 1, "a"), read(2, None, "never written")],
    "return and call in the same nanosecond are concurrent": [write(0, 5, "a"), read(5, 6, None)],
    "keys are independent": [write(0, 1, "a", key=1), read(2, 3, None, key=2), read(2, 3, None, key="1")],
}
BAD = {
    "a value from nowhere": [read(0, 1, "a")],
    "an old value": [write(0, 1, "a"), write(2, 3, "b"), read(4, 5, "a")],
    "a write is lost": [write(0, 1, "a"), read(2, 3, None)],
    "seen and unseen": [write(0, 9, "a"), read(1, 2, "a"), read(3, 4, None)],
    "readers disagree": [write(0, 9, "a"), write(0, 9, "b"), *(read(i, i + 1, v) for i, v in ((10, "a"), (12, "b")))],
    "a pending write takes effect once": [write(0, None, "a"), read(1, 2, "a"), write(3, 4, "b"), read(5, 6, "a")],
    "a pending write has no effect before its call": [read(0, 1, "a"), write(2, None, "a")],
}


@pytest.mark.parametrize("name", GOOD)
def test_linearizable(name):
    verdict = linearizable(GOOD[name], RegisterModel())
    assert verdict.ok, str(verdict)
    assert verdict
    assert "linearizable" in str(verdict)


@pytest.mark.parametrize("name", BAD)
def test_not_linearizable(name):
    verdict = linearizable(BAD[name], RegisterModel())
    assert not verdict
    assert "NOT linearizable" in str(verdict)


def by_force(operations, model):
    """Is there an order, tried one by one, of all that returned and some that did not?"""
    returned = [o for o in operations if not o.pending]
    pending = [o for o in operations if o.pending]
    for count in range(len(pending) + 1):
        for some in itertools.combinations(pending, count):
            for order in itertools.permutations([*returned, *some]):
                if in_time(order) and explains(order, model):
                    return True
    return False


def in_time(order):
    return not any(
        not later.pending and later.return_ns < earlier.call_ns for earlier, later in itertools.combinations(order, 2)
    )


def explains(order, model):
    states = {model.initial()}
    for operation in order:
        states = {after for state in states for after in model.apply(state, operation)}
    return bool(states)


@st.composite
def histories(draw, ops, results):
    """Up to five operations at any times, with any results; `ops` are (name, arguments)."""
    made = []
    for i in range(draw(st.integers(1, 5))):
        op, arguments = draw(st.sampled_from(ops))
        call, length = draw(st.integers(0, 12)), draw(st.none() | st.integers(0, 8))
        end = None if length is None else call + length
        result = None if end is None else draw(st.sampled_from(results[op]))
        made.append(Operation(str(i), op, "k", draw(st.sampled_from(arguments)), call, end, result))
    return made


REGISTER = histories([("write", ["a", "b"]), ("read", [None])], {"write": [None], "read": [None, "a", "b"]})
CACHE = histories(
    [("put", ["a", "b"]), ("get", [None]), ("delete", [None])],
    {"put": [None], "get": [None, "a", "b"], "delete": [None]},
)
POOL = histories(
    [("publish", ["a", "b"]), ("match", [None]), ("remove", [None])],
    {"publish": [True, False], "match": [None, "a", "b"], "remove": [True, False]},
)


@pytest.mark.parametrize(
    ("strategy", "model"),
    [(REGISTER, RegisterModel()), (CACHE, CacheModel()), (POOL, PoolModel()), (POOL, PoolModel(evicts=False))],
    ids=["register", "cache", "pool", "pool that evicts nothing"],
)
def test_agrees_with_brute_force(strategy, model):
    @settings(max_examples=300, deadline=None)
    @given(strategy)
    def check(operations):
        verdict = linearizable(operations, model)
        assert verdict.ok == by_force(operations, model)
        if not verdict:
            shown = verdict.failures[0]
            assert by_force(operations, model) == by_force(shown.operations, model)
            assert shown.last in operations
            assert shown.last in shown.operations
            assert f"* {shown.last.worker}" in str(verdict)

    check()


def simulated(count, workers, seed, broken=False):
    """A history of a real register: random intervals, effects at a random moment in each; or one read of old data."""
    random_ = random.Random(seed)
    free, spans, current, made = [0] * workers, [], None, []
    for _ in range(count):
        worker = min(range(workers), key=free.__getitem__)
        call = free[worker] + random_.randint(1, 5)
        effect = call + random_.randint(1, 20)
        free[worker] = effect + random_.randint(1, 20)
        spans.append((effect, call, free[worker], str(worker)))
    for number, (_, call, end, worker) in enumerate(sorted(spans)):
        if random_.random() < 0.5:
            current = number
            made.append(write(call, end, number, worker=worker))
        else:
            made.append(read(call, end, current, worker=worker))
    if broken:
        first = next(operation.argument for operation in made if operation.op == "write")
        made.append(read(max(free) + 1, max(free) + 2, first))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_long_histories(seed):
    good = simulated(500, 8, seed)
    assert linearizable(good, RegisterModel(), steps_max=500_000)
    verdict = linearizable(simulated(500, 8, seed, broken=True), RegisterModel(), steps_max=500_000)
    assert not verdict
    (failure,) = verdict.failures
    assert failure.last.call_ns == max(operation.call_ns for operation in failure.operations)
    assert failure.left_out > 400
    assert failure.source.argument == failure.last.result
    assert "Not shown, long before" in str(failure)
    assert len(str(failure).splitlines()) < 100


def test_the_counterexample_is_the_shortest_prefix():
    operations = [write(0, 1, "a"), write(2, 3, "b"), read(4, 9, "b"), read(4, 5, "a"), read(10, 11, "nonsense")]
    (failure,) = linearizable(operations, RegisterModel()).failures
    assert failure.operations == (operations[0], operations[1], operations[3])
    assert failure.last is operations[3]
    assert [o.argument for o in failure.order] == ["a", "b"]
    assert failure.state == "b"
    assert str(failure).splitlines() == [
        "key 'k': no order of these operations explains their results",
        "  at first the state is None (2 operations are not shown)",
        "    w  write('a') -> None  [-]",
        "    w  write('b') -> None    [-]",
        "  * r  read() -> 'a'           [-]",
        "  With the return of the one marked * no order is left. As far as one attempt goes:",
        "    1. write('a') -> None by w",
        "    2. write('b') -> None by w",
        "    Then the state is 'b', and none of the rest can take effect.",
    ]


def test_what_came_before_a_quiet_moment_is_not_shown():
    operations = [write(4 * i, 4 * i + 1, i) for i in range(100)] + [read(1000, 1001, 97)]
    (failure,) = linearizable(operations, RegisterModel()).failures
    assert failure.starts == (92,)
    assert failure.left_out == 93
    assert [o.argument for o in failure.operations] == [*range(93, 100), None]
    assert failure.source.argument == 97


def test_failures_of_several_keys():
    operations = [read(i, i + 1, "a", key=i) for i in range(10)]
    assert len(linearizable(operations, RegisterModel()).failures) == 3
    assert len(linearizable(operations, RegisterModel(), failures_max=20).failures) == 10


def test_search_limit():
    operations = [write(0, 100, i) for i in range(12)] + [read(101, 102, "x")]
    with pytest.raises(SearchLimit, match="record fewer workers"):
        linearizable(operations, RegisterModel(), steps_max=1000)


def test_a_failure_is_reported_even_where_it_cannot_be_made_short():
    """Whatever the limit, the answer is the limit or the failure."""
    operations, answers = [*simulated(60, 6, 1), read(100_000, 100_001, 0)], []
    for steps_max in (5, 50, *range(100, 1000, 25), 100_000):
        try:
            verdict = linearizable(operations, RegisterModel(), steps_max=steps_max)
        except SearchLimit:
            answers.append(False)
        else:
            assert not verdict
            assert not linearizable(verdict.failures[0].operations[-1:], RegisterModel())
            answers.append(True)
    assert answers == sorted(answers)
    assert set(answers) == {False, True}


def test_a_model_of_ones_own():
    """Nondeterministic: a counter that may lose increments, but never counts one twice."""

    class Lossy(Model[int]):
        reads = frozenset({"read"})

        def initial(self):
            return 0

        def apply(self, state, operation):
            if operation.op == "add":
                return [state, state + 1]
            return [state] if operation.pending or operation.result == state else []

    adds = [Operation("w", "add", "k", None, i, i + 1) for i in (0, 2, 4)]
    assert linearizable([*adds, read(6, 7, 1)], Lossy())
    assert linearizable([*adds, read(6, 7, 3)], Lossy())
    assert not linearizable([*adds, read(6, 7, 4)], Lossy())
    assert not linearizable([*adds, read(6, 7, 2), read(8, 9, 1)], Lossy())


def test_states_that_cannot_be_compared_are_named():
    with pytest.raises(TypeError, match="hashable"):
        linearizable([write(0, 1, ["a", "list"]), read(2, 3, None)], RegisterModel())


@pytest.mark.parametrize("model", [RegisterModel(), CacheModel(), PoolModel()])
def test_unknown_operation(model):
    with pytest.raises(ValueError, match="no operation 'fly'"):
        linearizable([Operation("w", "fly", "k", None, 0, 1)], model)


def pool_history(*steps):
    """(op, argument, result) one after the other."""
    return [
        Operation("w", op, "k", argument, 2 * i, 2 * i + 1, result) for i, (op, argument, result) in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("steps", "allowed", "allowed_if_nothing_is_evicted"),
    [
        ([("publish", 1, True), ("match", None, 1), ("match", None, None), ("match", None, 1)], True, True),
        ([("publish", 1, True), ("match", None, 2)], False, False),
        ([("match", None, 1), ("publish", 1, True)], False, False),
        ([("publish", 1, True), ("remove", None, True), ("match", None, 1)], False, False),
        ([("publish", 1, True), ("remove", None, True), ("publish", 1, True), ("match", None, 1)], True, True),
        ([("publish", 1, True), ("publish", 2, True), ("match", None, 2)], True, False),
        ([("publish", 1, True), ("publish", 2, True), ("match", None, 1)], False, False),
        ([("publish", 1, True), ("publish", 2, False), ("match", None, 1)], True, True),
        ([("publish", 1, True), ("publish", 2, False), ("match", None, 2)], False, False),
        ([("publish", 1, True), ("remove", None, False)], True, False),
        ([("remove", None, True)], False, False),
    ],
)
def test_pool_model(steps, allowed, allowed_if_nothing_is_evicted):
    assert linearizable(pool_history(*steps), PoolModel()).ok == allowed
    assert linearizable(pool_history(*steps), PoolModel(evicts=False)).ok == allowed_if_nothing_is_evicted


# The recorder ---------------------------------------------------------------------------------------------------------


def test_record(tmp_path):
    history = History(tmp_path, worker="me")
    with history.call("put", "key", "value") as call:
        call.result = True
    assert history.run("get", "key", None, lambda: "value") == "value"
    put, get = history.operations()
    assert (put.worker, put.op, put.key, put.argument, put.result) == ("me", "put", "key", "value", True)
    assert (get.op, get.argument, get.result) == ("get", None, "value")
    assert put.call_ns < put.return_ns <= get.call_ns < get.return_ns
    assert str(get) == "get() -> 'value'"


def test_an_exception_leaves_the_call_pending(tmp_path):
    history = History(tmp_path)
    with pytest.raises(ZeroDivisionError), history.call("put", "key", 1):
        raise ZeroDivisionError
    with history.call("get", "key"):
        pass
    assert [operation.pending for operation in history.operations()] == [True, True]
    assert str(history.operations()[0]) == "put(1) -> ?"


def test_many_keys_in_one_call(tmp_path):
    history = History(tmp_path)
    with history.call_many("match", ["a", "b", "c"]) as call:
        call.results[0], call.results[1] = 17, None
        assert call.results[2] is UNKNOWN
    with history.call_many("publish", ["a", "b"], [1, 2]) as call:
        call.results[:] = [True, False]
    operations = history.operations()
    assert [(o.key, o.argument, o.pending, o.result) for o in operations] == [
        ("a", None, False, 17),
        ("b", None, False, None),
        ("c", None, True, None),
        ("a", 1, False, True),
        ("b", 2, False, False),
    ]
    assert len({o.call_ns for o in operations[:3]}) == 1
    with pytest.raises(ValueError, match="2 keys and 1 arguments"), history.call_many("publish", ["a", "b"], [1]):
        pass


def test_threads_and_forks_write_files_of_their_own(tmp_path):
    history = History(tmp_path)
    history.run("op", "k", 0, lambda: None)

    def work(number):
        for i in range(50):
            history.run("op", "k", [number, i], lambda: None)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    children = [fork.Process(target=work, args=(number,)) for number in range(4, 8)]
    for worker in threads + children:
        worker.start()
    for worker in threads + children:
        worker.join()
    operations = history.operations()
    assert len(operations) == 1 + 8 * 50
    assert len({operation.worker for operation in operations}) == 1 + 8
    assert len(list(tmp_path.glob("*.journal"))) == 1 + 8
    assert not any(operation.pending for operation in operations)


def record_for_ever(folder):
    history = History(folder)
    for number in itertools.count():
        history.run("op", "k", number, lambda: None)


def test_kill_loses_one_outcome_at_most(tmp_path):
    child = fork.Process(target=record_for_ever, args=(tmp_path,))
    child.start()
    deadline = time.monotonic() + 30
    while len(History(tmp_path).operations()) < 100:
        assert time.monotonic() < deadline
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    operations = History(tmp_path).operations()
    assert [operation.argument for operation in operations] == list(range(len(operations)))
    assert not any(operation.pending for operation in operations[:-1])


def test_a_torn_line_is_ignored_and_a_damaged_one_named(tmp_path):
    history = History(tmp_path)
    for i in range(3):
        history.run("op", "k", i, lambda: None)
    (journal,) = tmp_path.glob("*.journal")
    whole = journal.read_bytes()
    for length in range(len(whole) + 1):
        journal.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        operations = history.operations()
        assert len(operations) == (lines + 1) // 2
        assert sum(not operation.pending for operation in operations) == lines // 2
    for damaged in (whole[3:], b"17\n" + whole, b'{"return":9,"ns":1,"results":{}}\n', b"{}\n"):
        journal.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"\.journal:1: "):
            history.operations()


def test_histories_can_be_kept(tmp_path):
    operations = [write(0, 1, "a"), write(2, None, {"b": [1, 2]}), read(3, 4, "a")]
    write_history(tmp_path / "kept.jsonl", operations)
    assert read_history(tmp_path / "kept.jsonl") == operations
    assert [json.loads(line)["op"] for line in (tmp_path / "kept.jsonl").open()] == ["write", "write", "read"]
    (tmp_path / "kept.jsonl").write_text('{"worker": "w"}\n')
    with pytest.raises(ValueError, match=r"kept\.jsonl:1: not an operation"):
        read_history(tmp_path / "kept.jsonl")


def test_the_interval_contains_the_call(tmp_path):
    history = History(tmp_path)
    with history.call("op", "k") as call:
        begun = time.monotonic_ns()
        call.result = None
        ended = time.monotonic_ns()
    (operation,) = history.operations()
    assert operation.call_ns <= begun <= ended <= operation.return_ns
    assert replace(operation, return_ns=None).pending


# Turns ----------------------------------------------------------------------------------------------------------------


def interleaved(choices, workers=2, steps=3):
    """What workers of three steps do, in the order in which they do it."""
    choices, done = iter(choices), []
    turns = Turns(lambda n: next(choices, 0) % n)

    def work(number):
        for step in range(steps):
            done.append((number, step))
            turns.pause()

    turns.run(*[partial(work, number) for number in range(workers)])
    return done


def test_turns_are_as_chosen():
    assert interleaved([]) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert interleaved([1, 0, 1, 0, 1, 0]) == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2)]
    choices = [random.Random(7).randrange(4) for _ in range(20)]
    assert interleaved(choices, workers=4) == interleaved(choices, workers=4)


def test_turns_reach_every_interleaving():
    orders = {tuple(interleaved(choices, steps=2)) for choices in itertools.product((0, 1), repeat=6)}
    assert len(orders) == 6  # two steps each: 4! / (2! 2!)


def test_a_failure_in_a_turn_is_raised_and_the_others_end():
    order = iter([0, 1, 1])
    turns, ended = Turns(lambda n: next(order)), []

    def other():
        try:
            turns.pause()
        finally:
            ended.append(True)

    def fails():
        turns.pause()
        raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        Turns(lambda n: 0).run(fails_at_once)
    with pytest.raises(ZeroDivisionError):
        turns.run(other, fails)
    deadline = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert ended == [True]


def fails_at_once():
    raise ZeroDivisionError


def test_locks_exclude_and_deadlocks_are_found():
    @settings(max_examples=50, deadline=None)
    @given(st.data())
    def exclude(data):
        turns, inside = Turns(lambda n: data.draw(st.integers(0, n - 1))), []

        def work():
            with turns.lock():
                inside.append(1)
                turns.pause()
                assert len(inside) == 1
                inside.pop()

        turns.run(work, work, work)

    exclude()
    order = itertools.cycle((0, 1))
    turns = Turns(lambda n: next(order) % n)

    def take(first, second):
        with turns.lock(first):
            turns.pause()
            with turns.lock(second):
                pass

    with pytest.raises(Deadlock, match="2 threads"):
        turns.run(partial(take, "a", "b"), partial(take, "b", "a"))
    turns.choose = lambda n: 0
    turns.run(partial(take, "a", "b"), partial(take, "a", "b"))


def test_turns_of_a_thread_that_waits_for_something_else(monkeypatch):
    monkeypatch.setattr("kvpool.testing.turns.WAIT_S", 0.05)
    gate = threading.Event()
    with pytest.raises(TimeoutError, match="neither paused nor ended"):
        Turns(lambda n: 0).run(gate.wait)
    gate.set()


def test_turns_outside_of_a_run():
    turns = Turns(lambda n: 0)
    turns.pause()
    with pytest.raises(RuntimeError, match=r"threading\.Lock"), turns.lock():
        pass
