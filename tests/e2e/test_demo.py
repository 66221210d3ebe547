"""The README's first command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def test_a_shorter_demo_keeps_its_promises() -> None:
    check("--words", "300", tokens=400)


@pytest.mark.rotate(7)
def test_demo_keeps_its_promises() -> None:
    check(tokens=2000)


def check(*flags: str, tokens: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scheduler.cli", "demo", "--json", "--tokens", "24", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["answers_equal_solo"] is True
    assert outcome["cold"]["prompt_tokens"] >= tokens
    assert outcome["handoff"]["path"] == "tcp"
    assert outcome["handoff"]["bytes"] > 0
    resume = outcome["resume"]
    assert resume["path"] == "restored"
    assert resume["new_tokens"] == resume["computed_tokens"] > 0
    assert resume["excess_tokens"] == 0
    assert outcome["saved"]["bytes"] > 0
