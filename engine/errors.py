"""The engine's error."""

from __future__ import annotations


class ModelError(Exception):
    """A model, a device or a request that the engine cannot work with: one line, cause and cure."""
