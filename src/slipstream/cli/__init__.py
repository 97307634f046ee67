"""The command line: one file per command."""

from slipstream.cli.app import main

__all__ = ["main"]
