"""All benchmarks in one run: a wrong path fails, runs are kept, and the last one is compared."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TINY  # noqa: F401  # the path to the kits of other rooms

from scheduler import cli
from scheduler.bench import history, suite
from store.taken import WrongPath, taken


def told(ratio: float = 1.0, **found: Any) -> str:
    path = {"expected": {"link": "rdma"}, "taken": {"link": "rdma", **found}}
    return json.dumps({"ratios": {"ours_vs_bare": ratio}, "path": path})


def test_a_path_that_was_not_taken_is_named() -> None:
    assert taken("x", {"a": 1}, {"a": 1, "b": 2}) == {"expected": {"a": 1},
                                                      "taken": {"a": 1, "b": 2}}  # fmt: skip
    with pytest.raises(WrongPath, match="link was tcp and not rdma; chunk was not told and not 64"):
        taken("x", {"link": "rdma", "chunk": 64}, {"link": "tcp"})


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (told(link="tcp"), "link was tcp and not rdma"),
        (json.dumps({"ratios": {}}), "does not say which path"),
        (json.dumps({"ratios": {}, "path": {"expected": {}, "taken": {}}}), "does not say"),
        ("nothing", "no result"),
        ("", "no result"),
    ],
    ids=["another path", "no path", "expects nothing", "no json", "silent"],
)
def test_a_result_without_its_path_fails(output: str, why: str) -> None:
    result = suite.judge(output, [])
    assert not result["ok"]
    assert why in result["error"]


def test_a_benchmark_runs_in_a_process_and_its_last_words_are_kept() -> None:
    def script(text: str) -> list[str]:
        return [sys.executable, "-c", text]

    good = suite.one("x", ["--quick"], script(f"print('noise'); print({told(0.5)!r})"))
    assert good["ok"]
    assert good["ratios"] == {"ours_vs_bare": 0.5}
    assert good["arguments"] == ["--quick"]
    bad = suite.one("x", [], script("import sys; sys.exit('bench: the link is cut')"))
    assert (bad["ok"], bad["error"]) == (False, "the link is cut")
    assert not suite.one("x", [], ["/nowhere"])["ok"]


def parsers(**quick: list[str] | None) -> dict[str, argparse.ArgumentParser]:
    found = {}
    for name, arguments in quick.items():
        found[name] = argparse.ArgumentParser(name)
        if arguments is not None:
            found[name].set_defaults(quick=arguments)
    return found


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    suite.flags(parser)
    return parser.parse_args([*words, "--json"])


def test_runs_are_kept_and_compared_with_the_last_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = iter((2.0, 3.0, 4.0))
    monkeypatch.setattr(
        suite, "one", lambda name, quick: suite.judge(told(next(ratios)), list(quick))
    )
    kept = tmp_path / "new" / "history.jsonl"
    benches = parsers(one=["-q"], soak=None)
    assert suite.run(arguments("--history", str(kept)), benches) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == {}
    kept.write_text(kept.read_text() + "{damaged\n")
    assert suite.run(arguments("--history", str(kept)), benches) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["changes"] == {"one": {"ours_vs_bare": 1.5}}
    assert set(second["results"]) == {"one"}, "the soak takes no part"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert suite.run(arguments("--history", str(kept), "--full"), benches) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == {}, "measured otherwise"
    assert len(kept.read_text().splitlines()) == 4


def test_one_that_fails_fails_the_run_and_is_compared_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = {"good": told(), "bad": told(link="tcp")}
    monkeypatch.setattr(suite, "one", lambda name, quick: suite.judge(outputs[name], quick))
    kept = tmp_path / "history.jsonl"
    benches = parsers(good=[], bad=[])
    args = arguments("--history", str(kept))
    args.json = False
    assert suite.run(args, benches) == 1
    shown = capsys.readouterr()
    assert "link was tcp and not rdma" in shown.out
    assert "ours_vs_bare" in shown.out
    assert set(history.last(kept)) == {"good"}


def test_only_what_takes_part_can_be_chosen() -> None:
    benches = parsers(a=[], b=["--x"], soak=None)
    assert suite.choose(benches, None) == {"a": [], "b": ["--x"]}
    assert suite.choose(benches, "b, a") == {"b": ["--x"], "a": []}
    with pytest.raises(Exception, match="no benchmark 'soak' takes part: choose from a, b"):
        suite.choose(benches, "soak")


def test_bench_without_a_name_is_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(args: argparse.Namespace, benches: Any) -> int:
        seen.update(only=args.only, names=set(benches))
        return 7

    monkeypatch.setattr(suite, "run", run)
    assert cli.main(["bench", "--only", "codec"]) == 7
    assert seen["only"] == "codec"
    wanted = {"codec", "store", "link", "queue", "stream", "pipeline", "decode", "prefill", "draft"}
    assert wanted <= seen["names"]
