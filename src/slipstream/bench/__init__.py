"""Measuring: decode, prefill; every figure with its spread, its command and its machine."""
