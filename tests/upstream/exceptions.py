"""The tests of torch's that pass with gloo and are not expected to pass with fusion, each with its reason."""

from __future__ import annotations

EXCEPTIONS: dict[str, str] = {}
"""By the name of the test."""
