"""`python -P -m engine.survey --model DIR`: the device and what a model would need, for `doctor`.

Prints one JSON object: `device` (see engine.device.Device.facts), and, with a model, `weights`
(bytes of its weight files), `whole` and `problem`. The model is not loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.device import describe
from engine.errors import ModelError
from engine.library import check


def survey(model: Path | None) -> dict[str, Any]:
    """The device, and the files of `model` where one is given. Raises ModelError without MLX."""
    found: dict[str, Any] = {"device": describe().facts()}
    if model is not None:
        problem = ""
        try:
            check(model)
        except ModelError as error:
            problem = str(error)
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        found |= {"weights": weights, "whole": not problem, "problem": problem}
    return found


def main() -> int:
    """Print the survey; exit status 1 where there is no MLX."""
    parser = argparse.ArgumentParser(prog="engine.survey")
    parser.add_argument("--model", type=Path)
    try:
        print(json.dumps(survey(parser.parse_args().model)))
    except ModelError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
