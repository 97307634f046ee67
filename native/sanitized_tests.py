"""Run pytest on a copy of the package that holds the sanitized extension: FOLDER, then pytest's arguments."""

import sys
from pathlib import Path

import pytest

folder, *arguments = sys.argv[1:]
# The editable install's finder would hand out the ordinary build.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path[:0] = [str(Path(folder).resolve()), str(Path.cwd())]

from slipstream.kernels.native import _native  # noqa: E402

if Path(folder).resolve() not in Path(_native.__file__).resolve().parents:
    sys.exit(f"{_native.__file__} is not the sanitized build")
sys.exit(pytest.main(arguments))
