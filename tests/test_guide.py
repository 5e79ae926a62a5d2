"""docs/testing.md: its code runs, its example finds the bug that it is about, and prints what the guide says."""

import re

import pytest
from native_build import ROOT

GUIDE = (ROOT / "docs" / "testing.md").read_text()


@pytest.fixture(scope="module")
def guide():
    """What the blocks of Python in the guide define, in their order."""
    names: dict = {"__name__": "guide"}
    for block in re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/testing.md", "exec"), names)
    return names


def test_the_example_finds_the_bug(guide):
    with pytest.raises(AssertionError, match="NOT linearizable"):
        guide["test_cache"]()


def test_the_right_one_passes(guide):
    guide["test_right_cache"]()


def test_the_chart_is_what_the_example_prints(guide):
    shown = re.search(r"^```text\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)[1]
    turns = iter([0, 1, 1, 1, 0, 0, 0, 0])  # A asks the store; B writes; A goes on, and reads again
    with pytest.raises(AssertionError) as error:
        guide["check"](
            lambda turns: guide["Cache"](guide["SlowStore"](turns)),
            (["read", "read"], ["write"]),
            choose=lambda n: min(next(turns), n - 1),
        )
    printed = re.sub(r"\d+\.T", "4711.T", str(error.value))
    assert shown in printed + "\n"


def test_the_rack_of_the_guide(guide):
    guide["test_a_lost_host"]()


def test_the_machine_of_the_guide(guide):
    guide["test_with_contains"]()


def test_the_counter_of_the_guide(guide):
    from kvpool.testing import Operation, linearizable

    add, read = Operation("w", "add", "k", None, 0, 1), Operation("w", "read", "k", None, 2, 3, 1)
    assert linearizable([add, read], guide["Counter"]())
    assert not linearizable([add, add, read], guide["Counter"]())
