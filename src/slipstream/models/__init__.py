"""What a model is: configs, architectures as short programs over the op set."""

from slipstream.models.config import ModelConfig
from slipstream.models.registry import read_config, record_program

__all__ = ["ModelConfig", "read_config", "record_program"]
