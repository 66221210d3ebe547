"""Which drafter proposes tokens for a model: as asked for, or what there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_vlm.speculative.drafters import DRAFTER_KIND_BY_MODEL_TYPE
from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

from engine.draft_model import ModelDrafter
from engine.errors import ModelError
from engine.heads import MtpDrafter
from engine.ngrams import READ_AT_ONCE, Drafter, NgramDrafter

if TYPE_CHECKING:
    from engine.model import Model

INNER = ("dflash", "dspark", "eagle")  # draft from inner layers of the target

__all__ = ["READ_AT_ONCE", "Drafter", "ModelDrafter", "MtpDrafter", "NgramDrafter", "find_drafter"]


def find_drafter(model: Model, asked: str) -> tuple[Drafter | None, str]:
    """The drafter that `asked` means for `model`, and why it is this one or none.

    "off"; "ngram"; "mtp", the head in the model's own directory; a directory with such a head or
    with a smaller model of the same vocabulary; "auto": the model's own head, else n-grams.
    Raises `ModelError` where what was asked for by name cannot be had.
    """
    if asked == "off":
        return None, "switched off"
    if asked == "ngram":
        return NgramDrafter(), "asked for"
    if asked == "mtp":
        return MtpDrafter.load(model, model.path), "asked for"
    if asked == "auto":
        if not _has_head(model.path):
            return NgramDrafter(), "the model has no prediction head of its own"
        try:
            return MtpDrafter.load(model, model.path), "the model's own prediction head"
        except ModelError as error:
            return NgramDrafter(), str(error)
    return _from_directory(model, Path(asked).expanduser()), "asked for"


def _has_head(path: Path) -> bool:
    """Whether a checkpoint still has the prediction layers that its config declares."""
    config = _config(path)
    try:
        splitter = get_mtp_splitter(source_config=config)
        if splitter is None:
            return False
        text = splitter.read_text_config(config)
        return any(keys for _, keys in splitter.iter_selected(path, text))
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        return False  # a config that says nothing about a head


def _from_directory(model: Model, path: Path) -> Drafter:
    from engine.model import load

    config = _config(path)
    if not config:
        raise ModelError(f"{path} has no config.json; decode.drafter names a model directory")
    if _has_head(path):
        try:
            return MtpDrafter.load(model, path)
        except ModelError:  # a smaller model with a head of its own, which fits only itself
            return ModelDrafter(model, load(path, model.device))
    kind = str(config.get("model_type") or config.get("speculators_model_type") or "")
    if kind not in DRAFTER_KIND_BY_MODEL_TYPE and "speculators_model_type" not in config:
        if any(word in json.dumps(config.get("architectures")).lower() for word in INNER):
            kind = "dflash"
        else:
            return ModelDrafter(model, load(path, model.device))
    if DRAFTER_KIND_BY_MODEL_TYPE.get(kind) == "mtp":
        return MtpDrafter.load(model, path)
    raise ModelError(
        f"{path.name} drafts from the target's inner layers over the whole prompt, which are "
        "not handed over; use a prediction head or a smaller model"
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
