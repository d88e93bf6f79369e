"""`FetchStats`: what a fetcher did, counted."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FetchStats:
    """What a fetcher did so far.

    Attributes:
        ranges: that arrived.
        wanted_bytes: of those.
        extra_bytes: received beyond them: by requests that failed half-way or lost.
        retried: requests made because one before them failed.
        hedged: second requests beside slow ones.
        hedges_won: of those that were first.
        requests: that may be under way at present.
    """

    ranges: int
    wanted_bytes: int
    extra_bytes: int
    retried: int
    hedged: int
    hedges_won: int
    requests: int

    def __str__(self) -> str:
        fields = [f"{self.requests} connections"]
        if self.retried:
            fields.append(f"{self.retried} tried again")
        if self.hedged:
            fields.append(f"{self.hedged} asked twice")
        if self.extra_bytes:
            fields.append(f"{self.extra_bytes / 2**20:,.1f} MiB extra")
        return ", ".join(fields)
