"""What is simulated: machines, the link between them, the store, and the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from scheduler.config import JobsConfig
from scheduler.simulation.profile import Profile
from scheduler.staying import Mode

#: 358 MB in 38 ms, as claimed for two Thunderbolt 5 cables.
LINK_BYTES_S = 358e6 / 0.038
#: Finished prompts that may be on their way while the next one is computed; see `PrefillLoop`.
TAILS = 2


@dataclass(frozen=True)
class Machine:
    """One worker. `chunk` and `small_chunk`: tokens per forward, 0 for the profile's own; `slots`:
    rows decoded at once; `memory`: bytes for state that waits, 0 for no limit."""

    name: str
    profile: Profile
    chunk: int = 0
    small_chunk: int = 0
    slots: int = 8
    memory: float = 0.0

    @property
    def forward(self) -> int:
        """Tokens per forward."""
        return self.chunk or self.profile.chunk


@dataclass(frozen=True)
class Link:
    """From prefill nodes to one decode node: bytes per second, and seconds of latency.

    With `overlap` rows leave while the next chunk is computed, otherwise all at the end.
    """

    rate: float = LINK_BYTES_S
    latency: float = 0.0005
    overlap: bool = True


@dataclass(frozen=True)
class Shelf:
    """The store: bytes it may hold (0: no limit), seconds for which a conversation stays in memory,
    and bytes per second at which one is read (0: in no time)."""

    size: float = 0.0
    hot_s: float = 30.0
    read_rate: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Everything but the requests. Without prefill nodes the decode nodes prefill by themselves.

    `shared`: the first prefill node is on the machine of the first decode node, and so on; each of
    the two is slowed down by the other as its profile says.
    """

    prefill: tuple[Machine, ...]
    decode: tuple[Machine, ...]
    link: Link = field(default_factory=Link)
    store: Shelf = field(default_factory=Shelf)
    settings: JobsConfig = field(default_factory=JobsConfig)
    handoff: Mode = "prompt"
    shared: bool = False

    @classmethod
    def of(cls, prefill: Sequence[Profile], decode: Sequence[Profile], slots: int = 8) -> Self:
        """Machines with these profiles and the defaults for everything else."""
        return cls(
            tuple(Machine(f"p{k}", profile) for k, profile in enumerate(prefill)),
            tuple(Machine(f"d{k}", profile, slots=slots) for k, profile in enumerate(decode)),
        )

    def more(self, role: str) -> Cluster:
        """With one more machine of a role, like the last one of it."""
        machines: tuple[Machine, ...] = getattr(self, role)
        twin = replace(machines[-1], name=f"{role[0]}{len(machines)}")
        grown = (*machines, twin)
        return replace(self, prefill=grown) if role == "prefill" else replace(self, decode=grown)


@dataclass(slots=True)
class Turn:
    """A request, and what became of it. Times are seconds of the simulation, -1: not yet.

    `prompt`: tokens of the whole prompt; `previous`: number of the turn it continues; `cached`:
    prompt tokens that the state of that turn covers, -1 for as many as it holds and 0 where it is
    gone. `at` is when it arrives: later than asked for where the turn before it had not ended.
    `stage` and `home` are chosen by the product's rules where they are not given.
    """

    number: int
    at: float
    prompt: int
    output: int
    owner: str = ""
    priority: str = "normal"
    previous: int | None = None
    cached: int = -1
    depth: int = 0
    stage: str = ""
    home: str = ""
    # --- what became of it
    held: int = 0
    path: str = "cold"
    begun: float = -1.0
    prefilled: float = -1.0
    handed: float = -1.0
    admitted: float = -1.0
    first: float = -1.0
    ended: float = -1.0
    moved: float = 0.0
    wire_s: float = 0.0
    parked: int = 0
    done: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.at

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens; 0 for a single one."""
        return (self.ended - self.first) / (self.output - 1) if self.output > 1 else 0.0
