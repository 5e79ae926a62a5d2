"""The registry of the cases is whole, and says what is there: tests that exist, a page that is made from it."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

_spec = importlib.util.spec_from_file_location("cases_report", Path(__file__).with_name("report.py"))
report = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = report
_spec.loader.exec_module(report)

# The ids of the public cases, by kind: gaps are numbers that were merged into others.
PUBLIC = {
    "L": "01 02 03 05 06 08 09 10 11 12 13 14",
    "C": "01 03 04 05 06 07 08 10 11 12 13 14",
    "N": "01 02 03 04 05 07 08 10 11 12 13 14 15 16 17 18 19 20 21",
    "K": "01 02 04 05 06 07 08 09 10 12 13 14 15",
    "I": "01 02 03 05 06 07",
    "P": "01 02 03 04 05 06 07 09 10 11 12 13",
    "Y": "01 02 03 04 06 07",
    "M": "01 02 03 04 05 06 07 09 10 11 12 13 14",
    "A": "01 02 04 05 06 07 08",
    "O": "01 02 03 04 06",
    "E": "01 02 03 04 05 06 07 09 10 11 12 13",
}


def test_every_case_is_there_and_decided():
    rows = report.cases()
    expected = {kind + number for kind, numbers in PUBLIC.items() for number in numbers.split()}
    assert len(expected) == 117
    assert {row.id for row in rows if not row.is_ours} == expected
    assert {row.id for row in rows if row.is_ours} == {f"{kind}X{i}" for kind in PUBLIC for i in (1, 2)}
    for row in rows:
        reasons = (row.kept_by, row.waits_for, row.does_not_apply_because)
        assert sum(map(bool, reasons)) == 1, f"{row.id} is not decided, or twice"
        assert 10 < len(row.title) < 110
    assert sum(row.verdict == "kept" and not row.is_ours for row in rows) >= 90


def test_what_keeps_a_case_is_a_test():
    for row in report.cases():
        for test in row.kept_by:
            file, _, name = test.partition("::")
            assert name in report.functions(file), f"{row.id} is kept by {test}, which there is not"


def test_every_test_that_carries_an_id_keeps_that_case():
    kept = {(row.id, test) for row in report.cases() for test in row.kept_by}
    carried = {(report.id_of(test.partition("::")[2]), test) for test in report.named_tests()}
    assert carried - kept == set()
    assert {test for _, test in kept if test.startswith("tests/cases/")} == {test for _, test in carried}


def test_the_page_is_what_the_registry_says():
    assert report.PAGE.read_text() == report.page(report.cases()), "python tests/cases/report.py --write"


def test_what_can_be_undone_is_there():
    """The source that a row of undo.toml takes away: else the row says nothing any more."""
    root = Path(__file__).resolve().parents[2]
    rows = tomllib.loads(Path(__file__).with_name("undo.toml").read_text())["undo"]
    lost = {row["case"] for row in rows if (root / row["file"]).read_text().count(row["old"]) != 1}
    assert not lost, "these rows of undo.toml want the source as it is now"
    cases = {row.id: row for row in report.cases()}
    assert all(cases[row["case"]].verdict == "kept" for row in rows)
