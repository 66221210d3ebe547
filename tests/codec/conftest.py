"""Paths and amounts for the codec's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))  # tiny_models, which several suites share

SOAK = bool(os.environ.get("TANDEM_SOAK"))
settings.register_profile(
    "codec",
    database=None,
    deadline=None,
    derandomize=not SOAK,  # as in tests/conftest.py
    max_examples=1000 if SOAK else 60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("codec")
