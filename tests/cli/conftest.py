"""Traffic of the tiny target, as the training's tests have it."""

from tests.training.conftest import tiny_fingerprint, tiny_floats, tiny_records, tiny_traffic

__all__ = ["tiny_fingerprint", "tiny_floats", "tiny_records", "tiny_traffic"]
