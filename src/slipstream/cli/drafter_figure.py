"""slipstream drafter figure: evaluations on several kinds of traffic in one picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from slipstream.cli.commands import Option
from slipstream.errors import UsageError


def figure(
    out: Annotated[Path, Option("--out", help="The picture, as SVG.")],
    record: Annotated[list[Path], Option("--record", help="A file of drafter eval --out; repeatable.")],
) -> None:
    """Draw what drafters reach on several kinds of traffic: tau and tokens a second, from records of drafter eval."""
    from slipstream.training.compared import compared

    try:
        reports = [json.loads(path.read_text()) for path in record]
    except ValueError as error:
        raise UsageError("only what drafter eval --out wrote can be drawn") from error
    out.write_text(compared(reports))
