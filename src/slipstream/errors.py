"""The errors a user sees: each names its cause and, where there is one, the next step."""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of all errors that are the answer, not a defect: printed without a traceback."""


class UsageError(SlipstreamError):
    """The caller asked for something that cannot be done as asked; exit code 2."""


class ModelFileError(SlipstreamError):
    """A model file is damaged, hostile, or of a kind that cannot be read."""

    def __init__(self, path: object, field: str, problem: str):
        super().__init__(f"{path}: {field}: {problem}")
        self.path = str(path)
        self.field = field
        self.problem = problem


class UnsupportedModelError(SlipstreamError):
    """A well-formed model that this build cannot run."""
