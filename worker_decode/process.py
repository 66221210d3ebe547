"""The decode process: the store and its socket first, then the model, then work."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from engine import drift
from engine.device import prepare
from engine.errors import ModelError
from engine.grammar import Words
from engine.keepalive import KeepAlive, keepalive_interval
from engine.model import load as load_model
from engine.profile import find, prefill_rate
from engine.text import load_tokenizer
from scheduler.config import Config
from scheduler.decode_loop import DecodeLoop
from scheduler.homes import DRAINED
from scheduler.host.role import run_role
from scheduler.jobs import Jobs
from scheduler.ledger.clock import Clock
from scheduler.nodes import Node, Nodes, Presence
from scheduler.owners import Owners, OwnersError
from scheduler.record import JobNotFound
from scheduler.redis_client import AWAY, connect
from scheduler.runs import Runs
from store.codec.header import CodecError
from store.errors import StoreDamaged, StoreError
from store.quotas import Limits
from store.remote import Remote
from store.serving import serve
from store.store import Store
from store.warming import Warming
from transport.capability import choose
from transport.epochs import Epochs
from transport.errors import LinkError
from transport.receiver import Receiver
from transport.versions import about
from worker_decode.doorway import Doorway
from worker_decode.engine import Engine
from worker_decode.evening import Evening
from worker_decode.inbox import Inbox
from worker_decode.lending import Lending
from worker_decode.memory import Memory
from worker_decode.moving import Moving

log = logging.getLogger("tandem.decode")


def main() -> int:
    """Run the worker; the exit status says whether a restart could help."""
    broken = (ModelError, CodecError, StoreDamaged, OwnersError)
    return run_role(run, for_good=broken, for_now=(StoreError, LinkError))


def run(config: Config, model_dir: Path) -> int:
    """Serve the decode queue of this node until a stop is asked for."""
    secret = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        limits = Limits(
            int(config.store.owner_gb * 1e9),
            int(config.store.daily_gb * 1e9),
            int(config.upkeep.low_disk_gb * 1e9),
        )
        size = int(config.store.size_gb * 1e9)
        store = Store.open(config.data_dir / "store", size, limits=limits)
        stack.callback(store.close)
        try:
            if left := store.sweep():
                log.info("%d states of prompts that were not kept are gone", left)
        except StoreError as error:  # only tidying: serving goes on, and `store check` names them
            log.warning("states of prompts that were not kept cannot be dropped: %s", error)
        store.quotas.limit_of = shares(Owners(config.data_dir), limits.owner_bytes)
        if config.store.warm_gb:
            stack.callback(Warming(store, int(config.store.warm_gb * 1e9)).close)
        server = serve(store, config.store_socket)
        stack.callback(server.close)
        rpc = str(config.store_socket)
        if config.store.rpc_host:
            host, port = config.store.rpc_host, config.store.rpc_port
            rpc = str(server.offer(Remote(host, port, secret)))
            log.info("the store answers at %s", rpc)
        node = Node(
            role="decode",
            name=config.node,
            boot=uuid.uuid4().hex,
            pid=os.getpid(),
            host=socket.gethostname(),
            queue=config.decode_queue,
            state="starting",
            secret=secret.hex(),
            rpc=rpc,
            facts={"model": config.model_name},
        )
        presence = stack.enter_context(Presence(config.redis_url, node))
        model = load_model(model_dir, prepare())
        layout = model.layout
        store.serve(model.fingerprint, layout.block_tokens, rows_alone=layout.rows_alone)
        tokenizer = load_tokenizer(model_dir)
        words = Words(tokenizer, model.vocab_size, model.eos_ids)
        words.prepare()
        log.info("state: %s", layout.describe())
        memory = Memory(int(config.store.hot_gb * 1e9))
        pulse = KeepAlive(keepalive_interval(config.device.keepalive_seconds, model.device))
        stack.callback(pulse.stop)
        inbox = Inbox(
            model.fingerprint, memory, config.link.deadline_seconds / 2, offered=pulse.wake
        )
        way = choose(config.link.backend, config.link.devices)
        log.info("link: %s (%s)", way.fabric or "tcp", way.reason)
        epochs = None
        if way.fabric is not None:
            epochs = Epochs(connect(config.redis_url), f"decode-{config.node}", config.redis_url)
            epochs.start()
            stack.callback(epochs.stop)
        patience = config.link.deadline_seconds / 2
        lending = Lending(model, store, memory, patience, pulse.wake)

        def receiver() -> Receiver:
            return Receiver(
                config.link.host,
                config.link.port,
                secret,
                inbox,
                config.link.deadline_seconds,
                node=config.node,
                epochs=epochs,
                devices=config.link.devices,
                lender=lending,
            )

        clock = Clock()
        jobs = Jobs(connect(config.redis_url, timeout=1.0, patience=0), config.jobs)
        profile = find(model_dir, model.device)
        known = {
            "model": config.model_name,
            "decode_rates": profile.decode if profile is not None else [],
            "prefill_rate": prefill_rate(profile),
            "about": about(),
            "drift": drift.sample(model),
        }
        mover = Moving(
            config,
            model,
            store,
            Nodes(connect(config.redis_url, timeout=2.0, patience=0)),
            Runs(connect(config.redis_url, timeout=2.0, patience=0), config.jobs),
            forget=lambda turns: engine.forget(turns),
            settle=lambda: engine.settle(),
            save=lambda turn: engine.kept.save_soon(turn, config.link.deadline_seconds),
        )
        stack.callback(mover.close)
        engine = Engine(
            config,
            model,
            tokenizer,
            store,
            memory,
            inbox,
            pulse=pulse,
            lending=lending,
            ended=lambda response: ended(jobs, response),
            clock=clock,
            tell=jobs.note,
            words=words,
            announce=lambda facts: presence.update(facts={**known, **facts}),
            mover=mover,
        )

        def delete_conversation(ident: str) -> bool:
            turns = store.conversation_turns(ident)
            engine.forget(turns)
            return store.delete_conversation(ident)

        server.add("delete_conversation", delete_conversation)
        server.add("update_conversation", mover.update)

        def take_new(yes: bool) -> None:
            known[DRAINED] = not yes
            presence.update(facts={**presence.node.facts, DRAINED: not yes})

        server.add("take_new", take_new)
        server.add("move_conversation", mover.move)
        loop = DecodeLoop(
            config.redis_url,
            engine,
            mover=mover,
            node=config.node,
            settings=config.jobs,
            lock_dir=config.data_dir,
            on_drain=lambda: presence.update(state="draining"),
            clock=clock,
        )
        doorway = Doorway(config.link.host, receiver, lambda at: presence.update(link=at))
        stack.callback(doorway.close)
        strays = threading.Thread(target=mover.clear, name="strays", daemon=True)
        strays.start()
        stack.callback(strays.join, 30.0)
        stack.callback(mover.stop)
        if config.store.balance_above:
            own = connect(config.redis_url, timeout=2.0, patience=0)
            stack.callback(Evening(own, config.node, config.store.balance_above).close)
        presence.update(state="ready", fingerprint=model.fingerprint.hex())
        log.info("ready: %s on %s", config.model_name, model.device.name)
        return loop.run()


def shares(owners: Owners, everybody: int) -> Callable[[str], int]:
    """How many bytes of states an owner may have: its own limit, or that of `everybody`."""

    def share(owner: str) -> int:
        found = owners.by_key(owner)
        own = found.stored_bytes if found is not None else 0
        return min(own, everybody) if own and everybody else own or everybody

    return share


def ended(jobs: Jobs, response: str) -> bool:
    """Whether a job is over, or not known any more. Asked while others wait for their tokens, so
    a Redis that is away counts as no."""
    try:
        return jobs.get(response).ended
    except JobNotFound:
        return True
    except AWAY:
        return False
