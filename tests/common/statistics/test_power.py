"""The table of power in docs/results/reversal.md, computed anew.

Not covered: the standard deviation that it assumes.
"""

import re

import pytest
from reversal import PAGE, power

DEVIATION = 0.035
ROW = re.compile(r"\| (\d+) \|((?: \d+ % \|){4})")


def test_the_pages_chances_are_those_of_welchs_test():
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert [int(seeds) for seeds, _ in rows] == [3, 10, 20]
    for seeds, cells in rows:
        printed = [int(cell) for cell in re.findall(r"\d+", cells)]
        computed = [100 * power(int(seeds), points / 100, DEVIATION) for points in (2, 5, 10, 15)]
        assert printed == pytest.approx(computed, abs=1.5)
