"""Slipstream: an LLM inference engine that runs against its own ceiling."""

__version__ = "0.1.0"
