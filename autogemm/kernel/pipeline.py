"""What both arch bodies share: the names of their mbarriers and the named (hardware) barriers of a CTA.

An operand ring has two mbarriers per stage, named after who signals whom:

=========  =========================================================================================
tma2mma    "full": the TMA engine has written the stage's bytes; whoever multiplies waits.
mma2tma    "empty": the multiplications that read the stage are done; the TMA producer waits.
=========  =========================================================================================

Barriers have no names in the IR, so each arch body lists its own in allocation order for the CPU execution's reports.
The producer's PipelineState starts at phase 1 (a fresh mbarrier lets a wait on the other parity pass), consumers' at 0.
"""

from __future__ import annotations

from typing import Final

from tvm.script import tirx as T

TMA2MMA: Final = "tma2mma"
MMA2TMA: Final = "mma2tma"

# Hardware barriers 0..15 of a CTA (PTX ISA, "bar, barrier"). 0 is __syncthreads; warpgroup w uses w + 1 for itself.
FIRST_FREE_NAMED_BARRIER: Final = 8


def warpgroup_barrier(warpgroup):
    """Build the id of the named barrier at which the 128 threads of ``warpgroup`` meet (``T.cuda.warpgroup_sync``)."""
    return warpgroup + 1


@T.meta_class
class OrderBarriers:
    """Named barriers that let two warpgroups take turns (ping-pong); whole warpgroups call ``wait`` and ``pass_turn``.

    Barrier ``first + i`` says "it is warpgroup i's turn": warpgroup i waits (128 threads), the other one arrives (128 threads).
    """

    def __init__(self, first=FIRST_FREE_NAMED_BARRIER):
        self.first = first

    @T.inline
    def wait(self, me):
        T.ptx.bar.sync(T.Cast("uint32", self.first + me), T.uint32(256))

    @T.inline
    def pass_turn(self, me):
        T.ptx.bar.arrive(T.Cast("uint32", self.first + 1 - me), T.uint32(256))


@T.inline
def skip(state, steps, depth):
    """Move a PipelineState of ``depth`` stages (a Python int) by ``steps`` (run time) at once."""
    state.stage = state.stage + T.truncmod(steps, depth)
    if state.stage >= depth:
        state.stage = state.stage - depth
        state.phase = state.phase ^ 1
    state.phase = state.phase ^ T.bitwise_and(T.truncdiv(steps, depth), 1)
