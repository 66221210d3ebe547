"""MLX made ready, and the directory of shared test modules on the path.

Import it before whatever imports MLX: its name sorts before `tiny_models`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.device import prepare

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
DEVICE = prepare()
