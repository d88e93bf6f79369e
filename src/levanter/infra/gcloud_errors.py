"""What gcloud's errors mean: which are worth a retry, and which need a person.

*capacity*: Google has no such chips free now; *transient*: a hiccup or a rate limit of the API; *preempted*: the VM was
reclaimed; *ssh*: a host could not be reached; *not_found*, *exists*: about the name. *quota* is not retried: asking
again does not raise it. Everything else is *other* and shown in full.

The texts are those that Google's API and gcloud print, as users have published them.
"""

import re
from typing import Literal

Meaning = Literal["capacity", "quota", "transient", "preempted", "ssh", "not_found", "exists", "other"]

_PATTERNS: tuple[tuple[Meaning, re.Pattern[str]], ...] = (
    # A per-minute request limit is worded as a quota too, but passes by itself.
    ("transient", re.compile(r"requests per minute|RATE_LIMIT_EXCEEDED|rateLimitExceeded", re.I)),
    (
        "transient",
        re.compile(
            r"Unable to find the server|Max retries exceeded|Network is unreachable|failure in name resolution"
            r"|gcloud crashed \((?:ConnectionError|TransportError|TimeoutError|SSLError|RemoteDisconnected)"
        ),
    ),
    ("quota", re.compile(r"quota limit|quota .{0,80}(?:exceeded|exhausted)", re.I)),
    (
        "capacity",
        re.compile(
            r"no more capacity in the zone|insufficient (?:reserved )?capacity|not have enough resources available"
            r"|RESOURCE_POOL_EXHAUSTED|STOCKOUT|is currently unavailable in the",
            re.I,
        ),
    ),
    ("preempted", re.compile(r'terminal state "(?:PREEMPTED|TERMINATED)"|in state (?:PREEMPTED|TERMINATED)')),
    ("preempted", re.compile(r'This TPU has state "(?:STOPPED|STOPPING|DELETING|HIDDEN)"')),
    ("not_found", re.compile(r"NOT_FOUND|was not found|could not be found")),
    ("exists", re.compile(r"ALREADY_EXISTS|already exists", re.I)),
    (
        "ssh",
        re.compile(
            r"exited with return code \[255\]|Could not SSH into the instance|connect to host \S+ port 22"
            r"|Connection (?:timed out|refused|reset|closed)|Broken pipe|client_loop: send disconnect"
            r"|maintenance event, and is currently unavailable|unable to connect to this TPU using IAP",
            re.I,
        ),
    ),
    ("transient", re.compile(r'"code": (?:4|13|14)\b|\b(?:UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED)\b')),
    ("capacity", re.compile(r'"code": 8\b|RESOURCE_EXHAUSTED')),
)
_WORKER_CODE = re.compile(r"Command execution on worker (\d+) failed with exit status (\d+)")


def classify_error(text: str) -> Meaning:
    """What an error's text means: the first pattern that matches it, in order."""
    for meaning, pattern in _PATTERNS:
        if pattern.search(text):
            return meaning
    return "other"


def worker_codes(text: str) -> dict[int, int]:
    """The exit codes of the hosts on which a command failed, as `gcloud … ssh --worker=all` reports them."""
    return {int(worker): int(code) for worker, code in _WORKER_CODE.findall(text)}
