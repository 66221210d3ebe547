"""What the names in a ledger mean: one sentence for each, in the order in which a request meets it.

A test reads the source for every name that is noted anywhere, and fails where one is missing here
or one here is not noted any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LANES: dict[str, str] = {
    "api": "The process that speaks HTTP: from the request's arrival until it is in a queue.",
    "queue": "Waiting in Redis for a worker to take it.",
    "prefill": "The prefill node: the prompt is computed, and perhaps the answer begun.",
    "link": "The connection between two nodes while state is on it.",
    "decode": "The decode node: the state is taken up and the answer written.",
    "store": "The decode node's store, at work beside or after the answer.",
}

STAGES: dict[str, str] = {
    "receive": "Reading the request and understanding its form, up to its acceptance.",
    "check": "At the API: taking the request's digest, by which the same one sent again is known; "
    "at the prefill node: a last look for a cancellation or a better job after the last forward.",
    "pictures": "Checking the request's images, and fetching those that are named by an address.",
    "shape": "Settling the form of the answer: tools, schema, reasoning.",
    "find": "Finding the conversation or stored beginning that the request goes on from.",
    "tokenise": "Rendering the template and turning what is new of the prompt into tokens.",
    "place": "Choosing the nodes and the queue, and looking up what is held of the prompt.",
    "compare": "Comparing the prompt with the client's last one, to name a head that changes.",
    "ask the time": "Asking Redis for its time, so that moments of several machines can be joined.",
    "accept": "The step in Redis that makes the request a job in a queue.",
    "wait": "In a queue, with nobody working on it.",
    "no prefill node": "In the prefill queue while no prefill node was there, until the decode "
    "node took the prompt over to compute it by itself.",
    "admit": "From being taken out of the queue to the first work on it.",
    "begin": "At the prefill node: taking up a parked or borrowed state, or an empty one; "
    "at the decode node: setting up the computation of a prompt whose state is not there.",
    "offer": "Offering the state to the decode node, which promises memory for it.",
    "between": "Since the forward before: a look for better jobs, or other rows having their turn.",
    "prefill": "Forwards of the prompt through the model.",
    "pack": "Copying state out of the model's arrays into the form in which it travels.",
    "send": "Giving packed state to the link; it waits only where the link is behind.",
    "settle": "From the last forward until a thread was free to finish the hand-off.",
    "announce": "Telling Redis that the prompt is computed and its state on its way.",
    "hand off": "Sending the rest of the state and waiting until the decode node has verified it.",
    "wire": "The whole transfer, from its offer to its acknowledgement; most of it lies beside the "
    "forwards.",
    "written": "Waiting until what was said at the prefill node is in the event log, and choosing "
    "the next queue.",
    "tell": "The step in Redis that ends a worker's run and makes the job's next state known.",
    "replay": "Reading back what an earlier run has said, so that it is not said otherwise.",
    "grammar": "Making the grammar of a schema or of tool calls ready, before the row starts.",
    "unpack": "Putting the state that the prefill node sent into the model's arrays, verified.",
    "restore": "Reading the state from the store into the model's arrays, verified.",
    "take over": "Going on with a state that was still in the model's memory.",
    "set up": "Making a row of the batch: sampling, stop strings, images, grammar.",
    "first decode": "From the row's start, or the end of its prompt, to its first token.",
    "decode": "From the first token to the last, at the decode node or where the answer was begun.",
    "flush": "Waiting until all events of the answer are in the log.",
    "record": "Making the turn durable: its tokens and messages, before its end is told.",
    "hand over": "Sending an answer under way to another decode node, because this one is to stop.",
    "copy": "Copying the conversation's state out of the model's memory, to be saved.",
    "save": "Writing the conversation's state into the store.",
    "lost run": "A worker had the job and died or fell silent; another one began again.",
    "running": "A worker has the job now, and tells what it did when it is done.",
}  # fmt: skip

#: What a row's time between its first and last token is made of.
DECODING: dict[str, str] = {
    "forward": "Forwards of the batch and the choice of tokens.",
    "chunks": "Parts of other rows' prompts that were computed between two steps.",
    "tell": "Making text and events of the tokens.",
    "care": "Looking after conversations that are not running: unpacking, saving, giving way.",
    "loop": "The rest of the loop: taking jobs, starting rows, and what no other part covers.",
}

FORKS: dict[str, str] = {
    "extend": "Which node computes the new tokens of a conversation, by cost or as asked for.",
    "begin": "The state before the new tokens was borrowed from the decode node, by this link.",
    "chunk": "Tokens a forward of the prompt, and who set that number.",
    "kernels": "Whether Metal's own kernels ran, or the plain operations in their place.",
    "link": "How the state travelled: rdma, tcp, or none.",
    "state": "Where the decode node had the state from: cold (nothing was held: just computed at "
    "the prefill node or, where it says so, here), extended (there, onto what was here), hot "
    "(in memory), restored (from the store), or recomputed.",
    "start": "The decode node could not start the row and sent the job back, for this reason.",
    "decode": "Whether the row was decoded with others in a batch, or by itself.",
    "drafter": "What guessed tokens ahead for the model to verify, or why nothing did.",
    "node": "The decode node that the answer moved to.",
    "end": "Why the response failed.",
    "save": "The state was not saved, for this reason; it is recomputed when it is wanted.",
}  # fmt: skip

#: Work that a process does once, by the name under which it is counted.
AGAIN: dict[str, str] = {
    "tokenizer_loads": "A tokenizer was read from disk.",
    "template_compiles": "A chat template was compiled.",
    "vocabularies": "A tokenizer's vocabulary was prepared for grammars.",
    "grammar_compiles": "A grammar was compiled that was not among those kept.",
    "redis_connections": "A connection to Redis was opened.",
    "fingerprints": "A model's files were digested.",
}

ROWS: dict[str, str] = {
    "forwards": "The prompt's forwards: tokens of each x how many in a row.",
    "decode steps": "Steps of the answer by the number of rows that the batch had.",
    "decode": "What the time from the first token to the last was made of.",
    "bytes": "What was moved for the request: between nodes, out of and into the store, to Redis.",
    "over budget": "The request cost more in Redis than its budget, which is made of its runs, the "
    "prompt's forwards and tokens, the answer's tokens, connections opened meanwhile, and looks "
    "whether another prompt waits.",
    "done again": "Work that should be done once a process, and was done for this request.",
    "prompt head": "What the client changes at the beginning of every prompt, and what that costs.",
    "route": "The costs that were compared to choose where new tokens are computed.",
    "gap": "A stretch that no stage covers, and the stages around it.",
    "not explained": "Everything that no stage covers; red where it is more than 2 % and 5 ms.",
    "clocks": "How far the machines' clocks may be apart in this account.",
}

COLUMNS: dict[str, str] = {
    "stage": "What was done; the colour is that of the timeline.",
    "where": "The lane: which process or queue it was in.",
    "times": "How many stretches there were of it.",
    "begins": "When the first of them began, in seconds since the request's arrival.",
    "seconds": "How long all of them lasted together.",
    "of its own": "Seconds of these that no more telling stage covers; they add up to the whole.",
    "share": "Its own seconds as a share of the whole.",
}  # fmt: skip

#: All of it: the groups of names and what each group is called.
LEGEND: dict[str, dict[str, str]] = {
    "lanes": LANES,
    "stages": STAGES,
    "of decode": DECODING,
    "forks": FORKS,
    "done again": AGAIN,
    "rows": ROWS,
    "columns": COLUMNS,
}


def legend_of(ledger: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The lanes, stages, parts, forks and work that one ledger (see `ledger_of`) names.

    A name without a sentence is left out: a newer API may tell of what this version does not know.
    """
    found: dict[str, dict[str, str]] = {}
    for group, names in _named(ledger):
        known = LEGEND[group]
        used = set(names)
        if chosen := {name: text for name, text in known.items() if name in used}:
            found[group] = chosen
    return found


def _named(ledger: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    spans = ledger["spans"]
    yield "lanes", [row["lane"] for row in ledger["stages"]]
    yield "stages", [row["stage"] for row in ledger["stages"]]
    yield "of decode", [name for span in spans for name in span.get("of") or ()]
    yield "forks", [fork["fork"] for fork in ledger["forks"]]
    yield "done again", [name for name, count in ledger["work"].items() if count]
