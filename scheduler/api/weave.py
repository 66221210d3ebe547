"""Putting generated token ids in the place of a client's rendering of answers within a prompt.

The prompt is rendered twice: as the client sent it, and with a mark where each known answer stands.
The texts between the marks are what the template writes around answers. They are looked for, in
order, in the first rendering; where what stands between two of them says what an answer says, the
ids that were generated stand for it. Every other text is tokenised as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.api.said import Item, says
from scheduler.api.tokenizer import Rendering, TemplateError, Tokenizer

_LOOK = 8
"""Places where the text after an answer may begin: an answer can hold such text itself."""
_THOUGHT_ENDS = ("</think>", "[/THINK]", "<channel|>")


@dataclass(frozen=True, slots=True)
class Answer:
    """A known answer: items[start:stop] of a request were generated as `ids`.

    `items` are the stored output items. The last id may be one that ends a turn.
    """

    start: int
    stop: int
    ids: Sequence[int]
    items: Sequence[Item]

    def mark(self) -> str:
        """What stands in its place while the text around it is learnt."""
        return f"Q2known{self.start}x5f0c83e6b1Q"


def marked(items: Sequence[Item], answers: Sequence[Answer]) -> list[Item]:
    """The items with a message that is a mark in the place of each answer."""
    made: list[Item] = []
    at = 0
    for answer in answers:
        made += items[at : answer.start]
        made.append({"type": "message", "role": "assistant", "content": answer.mark()})
        at = answer.stop
    return [*made, *items[at:]]


def encode(
    tokenizer: Tokenizer,
    plain: Rendering,
    render: Callable[[Sequence[Answer]], Rendering | None],
    answers: Sequence[Answer],
    opening: str = "",
    most: int | None = None,
) -> list[int]:
    """Token ids of `plain` with the ids of those `answers` that it says.

    `render` gives the same text with marks for some answers, or None where that cannot be had;
    `opening` is what a generation prompt writes before an answer begins. Raises TooLong as
    `Tokenizer.encode` does with `most`.
    """
    known = list(answers)
    for _ in range(3):
        if not known:
            break
        try:
            around = render(known)
        except TemplateError:
            break  # it wants to see the calls that tools answer
        if around is None:
            break
        pieces, failed = _match(tokenizer, plain, around.text, known, opening, most)
        if pieces is not None and not failed:
            return pieces
        known = [answer for answer in known if answer not in failed]
        if not failed:
            break
    return tokenizer.encode(plain, most)


def _match(
    tokenizer: Tokenizer,
    plain: Rendering,
    around: str,
    known: Sequence[Answer],
    opening: str,
    most: int | None,
) -> tuple[list[int] | None, list[Answer]]:
    """The ids, and the answers that cannot be found in the text."""
    lost = [answer for answer in known if around.count(answer.mark()) != 1]
    if lost:
        return None, lost
    segments: list[str] = []
    rest = around
    for answer in known:
        before, found, rest = rest.partition(answer.mark())
        if not found:
            return None, [answer]
        segments.append(before)
    segments.append(rest)
    text = plain.text
    if not text.startswith(segments[0]):
        return None, list(known)
    ids = tokenizer.encode(plain.cut(0, len(segments[0])), most)
    at = len(segments[0])
    failed: list[Answer] = []
    for number, answer in enumerate(known):
        following = segments[number + 1]
        last = number == len(known) - 1
        ends = _places(text, following, at, last)
        if not ends:
            return None, list(known)
        for end in ends:
            said = _ids(tokenizer, text[at:end], answer, opening)
            if said is not None:
                break
        else:
            failed.append(answer)
            end, said = ends[0], []
        if _crosses(plain, at) or _crosses(plain, end):
            return None, list(known)
        ids += said
        ids += tokenizer.encode(plain.cut(end, end + len(following)), most)
        at = end + len(following)
    return ids, failed


def _places(text: str, segment: str, at: int, last: bool) -> list[int]:
    """Where a segment may begin, at or after `at`; the last one ends the text."""
    if last:
        start = len(text) - len(segment)
        return [start] if start >= at and text.endswith(segment) else []
    found: list[int] = []
    while len(found) < _LOOK and segment:
        place = text.find(segment, at)
        if place < 0:
            break
        found.append(place)
        at = place + 1
    return found


def _crosses(plain: Rendering, at: int) -> bool:
    return any(start < at < stop for start, stop in plain.literals)


def _ids(tokenizer: Tokenizer, told: str, answer: Answer, opening: str) -> list[int] | None:
    """The ids that stand for `told`, or None where it does not say what the answer says."""
    generated = list(answer.ids)
    if generated and generated[-1] in tokenizer.eos_ids:
        generated.pop()
    if opening and told.startswith(opening):
        rest = told[len(opening) :]
        if stands_for(tokenizer, rest, generated, answer.items):
            return [*tokenizer.encode(opening), *generated]
    if stands_for(tokenizer, told, generated, answer.items):
        return generated
    # Thoughts that the template leaves out of earlier turns: what follows them was generated, too.
    shown = _after_thoughts(tokenizer, generated)
    spoken = [item for item in answer.items if item.get("type") != "reasoning"]
    if shown and len(shown) < len(generated) and stands_for(tokenizer, told, shown, spoken):
        return shown
    return None


def stands_for(tokenizer: Tokenizer, told: str, ids: Sequence[int], items: Sequence[Item]) -> bool:
    """Whether a template's words for an answer say what was generated as `ids`.

    Control tokens that a model writes amid its text are shown to nobody.
    """
    return says(told, tokenizer.decode(ids), items) or says(
        told, tokenizer.decode(ids, skip_special=True), items
    )


def _after_thoughts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The ids after the last mark that ends thinking, without white space at their beginning."""
    for mark in _THOUGHT_ENDS:
        end = tokenizer.encode(mark) if mark in tokenizer.added else []
        if len(end) == 1 and end[0] in ids:
            at = len(ids) - list(reversed(ids)).index(end[0])
            while at < len(ids) and not tokenizer.decode(ids[at : at + 1]).strip():
                at += 1
            return list(ids[at:])
    return []
