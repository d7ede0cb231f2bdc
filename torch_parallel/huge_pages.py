"""Asks torch to take large tensors in huge pages, where the kernel has them: in the fork server, before torch is there.

The memory of a large tensor is given back as soon as it is freed, so each backward pass takes pages for its gradients
anew: in steps of 4 kB that was a third of a backward pass of 25 million parameters, in steps of 2 MB it is hardly
anything. It holds for all code in a worker, torch's own strategies too.
"""

from __future__ import annotations

import os


def ask_for_them() -> None:
    """Unless the user has said something else. torch looks when it takes memory for the first time."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
