"""The prefill process: the model, then work."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from pathlib import Path

from engine import drift
from engine.device import prepare
from engine.drafters import find_drafter
from engine.errors import ModelError
from engine.grammar import Words
from engine.keepalive import KeepAlive, keepalive_interval
from engine.model import load as load_model
from engine.profile import find, prefill_rate
from engine.text import load_tokenizer
from scheduler.config import Config
from scheduler.host.role import run_role
from scheduler.nodes import Node, Nodes, Presence
from scheduler.prefill_loop import PrefillLoop
from scheduler.queue import prefill_queue
from scheduler.redis_client import connect
from store.codec.header import CodecError
from transport.capability import choose
from transport.epochs import Epochs
from transport.link import Rdma
from transport.versions import about
from worker_prefill.engine import Engine
from worker_prefill.handoff import Links
from worker_prefill.late import Late, chooser
from worker_prefill.parked import Parked

log = logging.getLogger("tandem.prefill")


def main() -> int:
    """Run the worker; the exit status says whether a restart could help."""
    return run_role(run, for_good=(ModelError, CodecError))


def run(config: Config, model_dir: Path) -> int:
    """Serve the prefill queue until a stop is asked for."""
    node = Node(
        role="prefill",
        name=config.node,
        boot=uuid.uuid4().hex,
        pid=os.getpid(),
        host=socket.gethostname(),
        queue=prefill_queue(),
        state="starting",
        facts={"model": config.model_name},
    )
    with Presence(config.redis_url, node) as presence:
        model = load_model(model_dir, prepare())
        log.info("state: %s", model.layout.describe())
        way = choose(config.link.backend, config.link.devices)
        log.info("link: %s (%s)", way.fabric or "tcp", way.reason)
        epochs = None
        rdma = None
        if way.fabric is not None:
            epochs = Epochs(connect(config.redis_url), f"prefill-{config.node}", config.redis_url)
            epochs.start()
            rdma = Rdma(epochs, way.fabric, config.link.devices, config.link.host)
        links = Links(Nodes(connect(config.redis_url)), config.link, config.node, rdma)
        links.reason = way.reason
        # An eighth of what MLX may keep resident is for prompts that were interrupted.
        parked = Parked(
            config.jobs.max_parked, model.device.working_set_bytes // 8, config.jobs.parked_seconds
        )
        pulse = KeepAlive(keepalive_interval(config.device.keepalive_seconds, model.device))
        small = config.prefill.small_chunk
        late = choice = None
        if config.prefill.handoff == "late":
            tokenizer = load_tokenizer(model_dir)
            decode = config.decode
            words = Words(tokenizer, model.vocab_size, model.eos_ids)
            words.prepare()
            drafter, _ = find_drafter(model, decode.drafter)
            late = Late(
                model,
                tokenizer,
                decode.max_output_tokens,
                pulse.working,
                drafter,
                decode.draft_tokens,
                words,
            )
            profile = find(model_dir, model.device)
            choice = chooser("late", profile, Nodes(connect(config.redis_url)))
            if profile is None:
                log.info("every state is handed off at its prompt's end: `tandem calibrate` first")
        engine = Engine(
            model, links, config.prefill.chunk, parked, pulse, small, late, config.store.snapshots
        )
        loop = PrefillLoop(
            config.redis_url,
            engine,
            choice=choice,
            node=config.node,
            settings=config.jobs,
            lock_dir=config.data_dir,
            on_drain=lambda: presence.update(state="draining"),
        )
        presence.update(
            state="ready",
            fingerprint=model.fingerprint.hex(),
            facts={
                "model": config.model_name,
                "device": model.device.kind,
                "chunk": engine.chunk,
                "prefill_rate": prefill_rate(find(model_dir, model.device)),
                "about": about(),
                "drift": drift.sample(model),
            },
        )
        presence.watch(lambda: {"pulses": pulse.pulses})
        log.info("ready: %s on %s", config.model_name, model.device.name)
        try:
            return loop.run()
        finally:
            pulse.stop()
            links.close()
            if epochs is not None:
                epochs.stop()
