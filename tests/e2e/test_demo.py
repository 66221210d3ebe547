"""The README's first command."""

from __future__ import annotations

import json
import subprocess
import sys


def test_demo_keeps_its_promises() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scheduler.cli", "demo", "--json", "--tokens", "24"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["answers_equal_solo"] is True
    assert outcome["cold"]["prompt_tokens"] >= 2000
    assert outcome["handoff"]["path"] == "tcp"
    assert outcome["handoff"]["bytes"] > 0
    resume = outcome["resume"]
    assert resume["path"] == "restored"
    assert resume["new_tokens"] == resume["computed_tokens"] > 0
    assert resume["excess_tokens"] == 0
    assert outcome["saved"]["bytes"] > 0
