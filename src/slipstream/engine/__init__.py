"""The loop that joins the layers."""

from slipstream.engine.engine import Engine
from slipstream.engine.model import LoadOptions, Model, load_model
from slipstream.engine.output import Chunk, TokenLogprob
from slipstream.engine.request import Terms, Timings

__all__ = ["Chunk", "Engine", "LoadOptions", "Model", "Terms", "Timings", "TokenLogprob", "load_model"]
