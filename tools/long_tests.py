"""Write ``tests/long.txt``, the tests that ``make test`` leaves out, from a report of pytest.

    python -m pytest -n 4 --dist worksteal --junit-xml report.xml
    python tools/long_tests.py report.xml 2

The second argument is the limit in seconds. Durations contain a test's own set-up. Where several
tests run at once on few cores, a limit of twice the seconds is about what a test takes alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).parents[1] / "tests" / "long.txt"
HEAD = """\
# Tests that took over {limit_s} s with four at a time on two cores. Made by: tools/long_tests.py
# 'make test' leaves them out; CI, 'make test-all' and pytest itself run them.
"""


def node(case: ElementTree.Element) -> str:
    """Return a test's node id; the report has the file as a module, with a class behind it."""
    parts = case.attrib["classname"].split(".")
    ends = [n for n in range(1, len(parts) + 1) if Path(*parts[:n]).with_suffix(".py").is_file()]
    file = "/".join(parts[: ends[0]]) + ".py"
    return "::".join([file, *parts[ends[0] :], case.attrib["name"]])


def main(report: str, limit_s: str) -> None:
    """Write the list of tests that a report says took more than so many seconds."""
    cases = ElementTree.parse(report).iter("testcase")
    long = sorted({node(c) for c in cases if float(c.attrib["time"]) > float(limit_s)})
    head = HEAD.format(limit_s=limit_s)
    LIST.write_text(head + "".join(f"{name}\n" for name in long), encoding="utf-8")
    print(f"{len(long)} tests in {LIST}")


if __name__ == "__main__":
    main(*sys.argv[1:])
