"""The tables of docs/fleets.md are those that the simulation makes."""

from __future__ import annotations

from pathlib import Path

from fleets import minutes, tables

PAGE = Path(__file__).parents[2] / "docs" / "fleets.md"


def test_the_page_has_the_tables_of_today() -> None:
    written = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")[2]
    assert written.partition("<!-- end of tables -->")[0].strip() == tables(), (
        "the simulation says something else by now: put what 'python benchmarks/fleets.py' prints "
        "between the marks of docs/fleets.md, and read its text again"
    )


def test_minutes_are_short() -> None:
    assert [minutes(s) for s in (30, 60, 335, 600, 6540)] == ["0.5", "1", "5.6", "10", "109"]
