"""What a model is: configs, architectures as short programs over the op set."""

from slipstream.models.config import ModelConfig
from slipstream.models.names import locate
from slipstream.models.registry import read_config, record_program

__all__ = ["ModelConfig", "locate", "read_config", "record_program"]
