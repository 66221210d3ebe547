"""`python -P -m engine.expander MODEL_DIR`: what images become in a prompt, for other processes.

Loads the model's processor, not its weights. Prints `{"image_token": id}` or `{"error": text}`,
then answers each line `{"image": base64}` with `{"ids": [...]}` or `{"error": text}`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from engine.device import prepare

if __name__ == "__main__":
    prepare()  # before the imports below bring MLX in

from engine.errors import ModelError
from engine.pictures import Processor


def serve(path: Path, lines: TextIO, out: TextIO) -> int:
    """Answer until `lines` end; returns the exit status."""

    def say(told: dict[str, Any]) -> None:
        out.write(json.dumps(told) + "\n")
        out.flush()

    try:
        processor = Processor(path)
    except (ModelError, OSError, ValueError) as error:
        say({"error": str(error)})
        return 1
    say({"image_token": processor.image_token})
    for line in lines:
        try:
            say({"ids": processor.ids(base64.b64decode(json.loads(line)["image"]))})
        except ModelError as error:
            say({"error": str(error)})
        except (ValueError, KeyError, TypeError, MemoryError):
            say({"error": "an image cannot be read: send a whole PNG, JPEG, WebP or GIF file"})
    return 0


if __name__ == "__main__":
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print
        sys.exit(serve(Path(sys.argv[1]), sys.stdin, answers))
