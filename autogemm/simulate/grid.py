"""The kernel before on the stream: under programmatic dependent launch it may still run when this one starts.

A kernel that executes ``griddepcontrol.wait`` may be launched so. Until that instruction returns, the previous kernel counts
as an agent that reads and writes all of global memory. The wait sets that agent's place in the waiting warp's clock;
mbarriers, named barriers, the cluster barrier and atomics hand it on like the rest of a clock. An access is ordered after the
previous kernel if that place has reached the accessing warp. A kernel without the instruction is launched when the previous
one has ended, and nothing is checked.
"""

from __future__ import annotations

from typing import Any

from .report import some
from .state import PREVIOUS_KERNEL, Lanes, Warp
from .sync import SyncOps


class GridOps(SyncOps):
    """griddepcontrol, and the check of accesses to global memory against the previous kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._grid_waiters: dict[int, set[Warp]] = {}  # by cluster index
        super().__init__(*args, **kwargs)
        self.dependent = self.race and self.program.programmatic

    def grid_wait(self, warp: Warp, mask: Lanes) -> float:
        """griddepcontrol.wait: the previous kernel has ended, and all its writes are visible to this warp."""
        warp.clock[PREVIOUS_KERNEL] = 1
        self._grid_waiters.setdefault(warp.cluster.index, set()).add(warp)
        return self.spend(warp, 1)

    def during_previous(self, warp: Warp, name: str, where: str, verb: str, *, writes: bool) -> None:
        """Report an access to ``where`` in global buffer ``name`` (empty: to none of it) while the previous kernel may run."""
        if not where:
            return

        def text() -> str:
            waiters = sorted(self.who(w) for w in self._grid_waiters.get(warp.cluster.index, ()))
            waits = f"nothing orders it after the wait of {some(waiters)}" if waiters else "no warp of this cluster waits"
            return (
                f"{where}: {'write' if writes else 'read'} by {verb} of {self.who(warp)} is not ordered after the previous "
                f"kernel (griddepcontrol.wait), which may still {'use' if writes else 'write'} it; {waits}"
            )

        self.found("race", ("previous kernel", name, verb, warp.group), text)
