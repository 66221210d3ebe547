"""The soak's report as Markdown."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

_NAMES = {
    "processes": "processes",
    "threads": "threads",
    "descriptors": "file descriptors",
    "memory_mb": "resident memory, MB",
    "shm_files": "shared memory, files",
    "shm_mb": "shared memory, MB",
    "store_mb": "store file, MB",
    "store_live_mb": "store, bytes in use, MB",
    "redis_mb": "Redis memory, MB",
    "redis_keys": "Redis keys",
    "files": "files in both data directories",
}


def markdown(found: dict[str, Any]) -> str:
    """The report of `Result.to_dict()`."""
    where = "two network namespaces joined by a cable" if found["cables"] else "one network"
    lines = [
        "# Soak",
        "",
        (
            f"{time.strftime('%Y-%m-%d', time.gmtime())}, {found['minutes']:.1f} minutes, seed "
            f"{found['seed']}, model `{found['model']}`, {platform.system()} {platform.machine()}, "
            f"{os.cpu_count()} CPU cores (shared with other work), {where}. "
            "Both hosts were set up by `tandem init` alone."
        ),
        "",
        (
            f"**{'Passed' if found['good'] else 'FAILED'}**: {found['accepted']} jobs accepted, "
            f"{len(found['lost'])} lost, {len(found['failed'])} failed; {found['checked']} answers "
            f"computed again alone without a cache, {len(found['wrong'])} wrong, "
            f"{found['unchecked']} unchecked; {found['left_live']} jobs left at the end."
        ),
        "",
        "| jobs | |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(found["ended"].items())),
        *(f"| state came by: {name} | {n} |" for name, n in sorted(found["paths"].items())),
        f"| not accepted while something was down | {found['refused']} |",
        f"| answer to the submission lost | {found['unknown']} |",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(found["faults"].items())),
        "",
    ]
    if found["recovery_median_s"] is not None:
        lines += [
            (
                f"Ready again after a fault: {found['recovery_median_s']:.1f} s in the median, "
                f"{found['recovery_max_s']:.1f} s at most (model load included)."
            ),
            "",
        ]
    lines += [
        "Medians over both hosts in the second and in the last quarter (the first is warm-up):",
        "",
        "| | second quarter | last quarter | most | flat |",
        "|---|---|---|---|---|",
    ]
    for one in found["courses"]:
        lines.append(
            f"| {_NAMES[one['name']]} | {one['early']:.1f} | {one['late']:.1f} | "
            f"{one['most']:.1f} | {'yes' if one['flat'] else 'NO'} |"
        )
    for name in ("lost", "failed", "wrong", "trouble"):
        if found[name]:
            lines += ["", f"{name}:", "", *(f"- {line}" for line in found[name][:20])]
    lines += [
        "",
        (
            f"Run it: `tandem bench soak --minutes {round(found['minutes'])} "
            f"--seed {found['seed']} --model {found['model']}` "
            "(as root on Linux, for the namespaces)."
        ),
    ]
    return "\n".join(lines) + "\n"
