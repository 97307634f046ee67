"""No class of attacks is lost: there are twelve, those that docs/security.md lists, each with several cases."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parents[1] / "docs" / "security.md"


def test_there_are_twelve_with_two_cases_each() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qo", "addopts=", "-m", "not long", str(FOLDER)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1], timeout=120)
    assert found.returncode == 0, found.stdout[-2000:]
    cases = Counter(map(int, re.findall(r"::[Tt]est_?(\d+)", found.stdout)))
    listed = re.findall(r"^\| (\d+) [a-z ]+ \|", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(cases) == list(map(int, listed)) == list(range(1, 13))
    assert min(cases.values()) >= 2, cases
