"""benchmarks/README.md is what `slipstream bench table benchmarks` prints of the records there."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.bench.table import results_table

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_the_page_shows_the_records() -> None:
    assert (FOLDER / "README.md").read_text() == results_table(FOLDER) + "\n"


def test_a_record_that_does_not_say_where_it_is_from_is_passed_over(tmp_path: Path) -> None:
    record = json.loads((FOLDER / "epyc-turin-avx512" / "host-smollm2-135m.json").read_text())
    (tmp_path / "whole.json").write_text(json.dumps(record))
    del record["machine"]
    (tmp_path / "nowhere.json").write_text(json.dumps(record))
    assert results_table(tmp_path).count("| host, ") == 1
