"""Drafters as torch modules: what is trained."""
