"""The loop that joins the layers."""

from slipstream.engine.engine import Engine, Terms, Timings
from slipstream.engine.model import LoadOptions, Model, load_model
from slipstream.engine.output import Chunk, TokenLogprob

__all__ = ["Chunk", "Engine", "LoadOptions", "Model", "Terms", "Timings", "TokenLogprob", "load_model"]
