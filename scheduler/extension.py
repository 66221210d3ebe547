"""Where the new tokens of a continued conversation are computed: at the decode node, which holds
its state, or at the prefill node, to which the state goes and from which what is new comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from scheduler.jobs import Jobs
from scheduler.nodes import Node

Extend = Literal["auto", "decode", "prefill"]
#: The key of a request's metadata that overrides `routing.extend`.
METADATA = "tandem_extend"
#: So few new tokens are never worth a question to Redis: a round of messages costs as much.
FEW = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """What the choice is made from. Rates are 0 where nothing has measured them.

    `held`, `new`: tokens of the state and after it. `decode_rate`, `prefill_rate`: prompt tokens
    per second of the two nodes. `link_rate`: bytes per second between them. `wait`: seconds until
    the prefill node is free. `fixed`, `per_token`: bytes of an empty state, and of each token.
    `together`: both nodes are on one machine, and compute with the same device.
    """

    held: int
    new: int
    decode_rate: float = 0.0
    prefill_rate: float = 0.0
    link_rate: float = 0.0
    wait: float = 0.0
    fixed: float = 0.0
    per_token: float = 0.0
    together: bool = False

    @property
    def bytes(self) -> float:
        """What crosses the link: the whole state there, its new rows and the snapshot back."""
        return 2 * self.fixed + self.per_token * (self.held + self.new)

    @property
    def decode_seconds(self) -> float:
        """Until the new tokens are computed at the decode node."""
        return self.new / self.decode_rate

    @property
    def prefill_seconds(self) -> float:
        """Until they are computed at the prefill node and back."""
        return self.wait + self.bytes / self.link_rate + self.new / self.prefill_rate


def choose(mode: Extend, costs: Costs) -> dict[str, Any]:
    """The route: `extend` ("decode" or "prefill"), `reason`, and the numbers it was made from."""
    if mode != "auto":
        return {"extend": mode, "reason": f"asked for: {mode}"}
    if costs.new <= FEW:
        return {"extend": "decode", "reason": f"{costs.new} new tokens are few"}
    if costs.together:
        return {"extend": "decode", "reason": "both nodes are on one machine"}
    numbers = {name: round(value, 6) for name, value in asdict(costs).items()}
    for name, what in (
        ("decode_rate", "the decode node's prefill rate"),
        ("prefill_rate", "the prefill node's rate"),
        ("link_rate", "the link's rate"),
        ("per_token", "the size of the state"),
    ):
        if numbers[name] <= 0:
            return {"extend": "decode", "reason": f"{what} is not known yet", **numbers}
    here, there = costs.decode_seconds, costs.prefill_seconds
    numbers |= {
        "bytes": round(costs.bytes),
        "decode_seconds": round(here, 4),
        "prefill_seconds": round(there, 4),
    }
    nearer = "decode" if here <= there else "prefill"
    return {"extend": nearer, "reason": f"{here:.3g} s at decode, {there:.3g} s there", **numbers}


def worth_resuming(costs: Costs, local_tokens: int) -> bool:
    """Whether a stored beginning is gone on from at the decode node, rather than the whole prompt
    computed at the prefill node.

    Where a rate is not known: if at most `local_tokens` are new, or a quarter of the prompt.
    """
    rates = (costs.decode_rate, costs.prefill_rate, costs.link_rate, costs.per_token)
    whole = costs.held + costs.new
    if costs.new <= local_tokens or min(rates) <= 0:
        return costs.new <= max(local_tokens, whole // 4)
    moved = (costs.fixed + costs.per_token * whole) / costs.link_rate
    return costs.decode_seconds <= costs.wait + moved + whole / costs.prefill_rate


def parse(value: object) -> Extend:
    """A mode from a request's metadata. Raises ValueError that names those there are."""
    if value not in get_args(Extend):
        raise ValueError(f"is {str(value)[:40]!r}, not one of {', '.join(get_args(Extend))}")
    return cast(Extend, value)


def measure(
    jobs: Jobs, nodes: Sequence[Node], node: str, held: int, new: int, owner: str, priority: str
) -> Costs:
    """The costs of extending a state of decode node `node`, as everything stands now.

    Measured rates first, then those of the nodes' profiles. Without a prefill node that is ready,
    its rate counts as unknown. Raises what Redis raises.
    """
    pipe = jobs.client.pipeline(transaction=False)
    pipe.mget("tandem:rate:prefill", f"tandem:rate:link:{node}", f"tandem:rate:extend:{node}")
    pipe.hmget(f"tandem:budget:{node}", "fixed", "per_token")
    (prefill, link, extend), (fixed, per_token) = pipe.execute()
    there = [n for n in nodes if n.role == "prefill" and n.state == "ready"]
    here = [n for n in nodes if n.role == "decode" and n.name == node]
    rate = (_number(prefill) or max(map(_told, there))) if there else 0.0
    return Costs(
        held=held,
        new=new,
        decode_rate=_number(extend) or max(map(_told, here), default=0.0),
        prefill_rate=rate,
        link_rate=_number(link),
        wait=jobs.predicted_wait(new, owner=owner, priority=priority) if rate else 0.0,
        fixed=_number(fixed),
        per_token=_number(per_token),
        together=bool(there) and {n.host for n in there} == {n.host for n in here},
    )


def _told(node: Node) -> float:
    rate = node.facts.get("prefill_rate")
    return float(rate) if isinstance(rate, int | float) else 0.0


def _number(value: bytes | None) -> float:
    return float(value or 0.0)
