"""What a server did in one epoch that plain averages would hide: how stale its updates were, and what it left out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """Of one epoch, on the server.

    `staleness_counts[s]` gradients were worked out on parameters that were s updates old when they were applied (Ho et
    al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013).
    """

    updates: int = 0
    dropped: int = 0  # workers' shares of a step that were not waited for
    samples_lost: int = 0  # in these shares
    staleness_counts: list[int] = field(default_factory=list)

    def count(self, staleness: int) -> None:
        """One more gradient of this staleness."""
        missing = staleness + 1 - len(self.staleness_counts)
        self.staleness_counts += [0] * missing
        self.staleness_counts[staleness] += 1
