"""Which kernel a matrix product should run: a pure function of the problem, the device and the rows. No torch, no clock.

Order: a Row for exactly this question; a neighbour whose measurements bound the time; the arch's default Config; torch.matmul.
What was never measured on a shape runs there only if the neighbours' measurements bound its time by cuBLAS's, or if the
caller allows unmeasured picks. The choice depends on nothing else, so every rank of a job makes the same one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from .algorithm import Algorithm
from .arch import ArchName
from .config import Config, named_config
from .constraints import problem_violations, violations
from .device import Device
from .errors import InputError
from .problem import Problem
from .record import Choice, Key, Row
from .resources import geometry

Source = Literal["exact", "nearest", "default", "torch"]

# Times of two shapes come from different moments at different clocks, and a bound that joins them must allow for it. On an
# H200, over 66 Configs and 24 shapes, no shape's best Config ran more than 11 % longer on a shape that is no larger in any
# extent (cuBLAS: 6 %).
TRANSFER_SLACK: Final = 0.11

DEFAULT_CONFIG: Final[dict[ArchName, Config]] = {
    "sm_90a": named_config("cooperative", "sm_90a"),
    "sm_100a": named_config("v9", "sm_100a"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One reason why rows are skipped or doubted on a device.

    Attributes:
        cause: stable identifier (``sm-count``, ``gpu``, ``environment``, ``cublaslt``).
        text: what, which rows, why and what to do next.
        rows: how many rows it concerns.
        skipped: False if the rows are used all the same.
    """

    cause: str
    text: str
    rows: int
    skipped: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What runs, and why.

    Attributes:
        source: ``exact``, ``nearest``, ``default`` or ``torch`` (cuBLAS through torch.matmul).
        problem: what was asked; None if the tensors pose no Problem.
        arch: of the device, None if no kernels are generated for it.
        config: kernel to launch; None if another thing runs.
        algorithm: cuBLASLt algorithm to run; None if another thing runs.
        row: the Row that was decisive, also where it says that cuBLAS is faster; None if none was.
        status: ``measured`` or ``predicted`` for the row's evidence, ``none`` without a row.
        slowdown_bound: most by which the pick's time may exceed cuBLAS's, as a ratio of times; the measured ratio for an
            exact Row, a bound from the neighbours for a nearest one, None where nothing was measured.
        regret_bound: most by which the pick may be slower than the best of the tuned Configs, cuBLAS and its algorithms, as a
            fraction of that time; None where no measurement bounds it.
        sm_count: SMs the kernel is launched on.
        reason: a sentence for people.
    """

    source: Source
    problem: Problem | None
    reason: str
    sm_count: int
    arch: ArchName | None = None
    config: Config | None = None
    algorithm: Algorithm | None = None
    row: Row | None = None
    slowdown_bound: float | None = None
    regret_bound: float | None = None

    @property
    def runs(self) -> Choice:
        """``autogemm`` for the kernel of ``config``, ``cublaslt`` for ``algorithm``, ``cublas`` for torch.matmul."""
        return "autogemm" if self.config is not None else "cublas" if self.algorithm is None else "cublaslt"

    @property
    def what(self) -> str:
        """Name of what runs, for people."""
        if self.algorithm is not None:
            return str(self.algorithm)
        return "torch.matmul" if self.config is None else self.config.id

    @property
    def status(self) -> Literal["measured", "predicted", "none"]:
        """Kind of the evidence behind the decision."""
        return "none" if self.row is None else self.row.status

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; the row is named by its key."""
        return {
            "source": self.source, "runs": self.runs, "problem": None if self.problem is None else str(self.problem),
            "arch": self.arch,
            "config": None if self.config is None else self.config.to_knobs(),
            "config_id": None if self.config is None else self.config.id,
            "algorithm": None if self.algorithm is None else asdict(self.algorithm),
            "row": None if self.row is None else str(self.row.key), "status": self.status,
            "slowdown_bound": self.slowdown_bound, "regret_bound": self.regret_bound,
            "sm_count": self.sm_count, "reason": self.reason,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.problem or 'no problem'}: {self.source} -> {self.what}: {self.reason}"

    def instead(self, reason: str, sm_count: int) -> Decision:
        """Return torch.matmul in place of this pick, which can't be carried out here for ``reason``."""
        return replace(
            self, source="torch", config=None, algorithm=None, slowdown_bound=None, regret_bound=None, sm_count=sm_count,
            reason=f"{reason} (it would be {self.source}: {self.reason})",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows arranged for look-up.

    Where two rows have one Key, the measured one stays; of two alike, the one whose date, then Config id, is later.
    """

    by_key: dict[Key, Row]
    by_family: dict[tuple[str, ...], tuple[Row, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Table:
        """Return the table of ``rows``, in any order."""
        by_key: dict[Key, Row] = {}
        for row in rows:
            held = by_key.get(row.key)
            if held is None or _rank(row) > _rank(held):
                by_key[row.key] = row
        families: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in by_key.values():
            families[row.key.family].append(row)
        return cls(by_key=by_key, by_family={f: tuple(sorted(rows, key=_order)) for f, rows in families.items()})

    @property
    def rows(self) -> list[Row]:
        """Every row, in a fixed order."""
        return sorted(self.by_key.values(), key=_order)

    def family(self, key: Key) -> tuple[Row, ...]:
        """Return the rows of the same arch, types, layout and epilogue as ``key``, whatever their GPU and SM count."""
        return self.by_family.get(key.family, ())


def _rank(row: Row) -> tuple[bool, str, str]:
    return (row.status == "measured", row.provenance.date, row.config.id)


def _order(row: Row) -> tuple[str, ...]:
    key = row.key
    return (*key.family, key.gpu, *(f"{extent:010d}" for extent in (key.sm_count, key.n, key.k, key.m)))


def screen(table: Table, device: Device) -> tuple[Notice, ...]:
    """Return what is wrong with ``table`` on ``device``, one Notice per cause.

    Rows of another SM count, and of another GPU where this one has none, are skipped. Rows measured under another driver,
    torch or power limit are used, since their kernels are the same, but what they are compared with may have changed. Of rows
    that name an algorithm of another cuBLASLt, only the kernels are used.
    """
    if device.arch is None or not table.by_key:
        return ()
    notices = []
    own = [row for row in table.rows if row.key.gpu == device.gpu and row.key.arch == device.arch]
    budgets = [row for row in own if row.key.sm_count < device.sm_count]
    other_size = [row for row in own if row.key.sm_count > device.sm_count]
    if budgets and not any(row.key.sm_count == device.sm_count for row in own):
        other_size += budgets
    if other_size:
        counts = ", ".join(str(c) for c in sorted({row.key.sm_count for row in other_size}))
        notices.append(
            Notice(
                cause="sm-count", rows=len(other_size), skipped=True,
                text=f"{_names(other_size)} skipped: tuned for {counts} SMs, this {device.gpu} has {device.sm_count}; "
                "tune on this GPU, or pass sm_count= if you mean an SM budget",
            )
        )  # fmt: skip
    if not own:
        others = ", ".join(sorted({f"{row.key.gpu} ({row.key.arch})" for row in table.rows}))
        notices.append(
            Notice(
                cause="gpu", rows=len(table.by_key), skipped=True,
                text=f"{_names(table.rows)} skipped: tuned for {others}, this is {device.gpu} ({device.arch}); tune here",
            )
        )  # fmt: skip
    drifted = {row.key: drift(row, device) for row in own}
    concerned = [row for row in own if drifted[row.key]]
    if concerned:
        what = "; ".join(sorted({text for texts in drifted.values() for text in texts}))
        notices.append(
            Notice(
                cause="environment", rows=len(concerned), skipped=False,
                text=f"{_names(concerned)} used, though not measured under these conditions: {what}; run autogemm verify",
            )
        )  # fmt: skip
    estranged = [row for row in own if row.choice == "cublaslt" and strange(row, device)]
    if estranged:
        versions = ", ".join(sorted({str(row.cublaslt.algorithm.version) for row in estranged if row.cublaslt is not None}))
        notices.append(
            Notice(
                cause="cublaslt", rows=len(estranged), skipped=False,
                text=f"{_names(estranged)} used without the cuBLASLt algorithms that they name, of version {versions}; "
                f"the library here {_here(device)}; their kernels or torch.matmul run; run autogemm verify, or tune again",
            )
        )  # fmt: skip
    return tuple(notices)


def strange(row: Row, device: Device) -> str:
    """Return why the cuBLASLt algorithm that a Row holds can't be run on ``device``; empty if it can, as far as is known."""
    if row.cublaslt is None or device.cublaslt in (None, row.cublaslt.algorithm.version):
        return ""
    return f"its cuBLASLt algorithm is of version {row.cublaslt.algorithm.version}, the library here {_here(device)}"


def _here(device: Device) -> str:
    return f"is version {device.cublaslt}" if device.cublaslt else "is missing"


def drift(row: Row, device: Device) -> tuple[str, ...]:
    """Return how the conditions of a measured Row differ from those of ``device``, as far as both are known."""
    if row.measurement is None:
        return ()
    was = row.measurement.environment
    pairs = [("driver", was.driver, device.driver), ("torch", was.torch, device.torch)]
    if was.power_limit_w is not None and device.power_limit_w is not None:
        pairs.append(("power limit", f"{was.power_limit_w:.0f} W", f"{device.power_limit_w:.0f} W"))
    return tuple(f"{name} was {old}, is {new}" for name, old, new in pairs if new is not None and old != new)


def _names(rows: list[Row]) -> str:
    shown = ", ".join(row.key.problem.shape for row in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return f"{len(rows)} tuned row{'' if len(rows) == 1 else 's'} ({shown}{more})"


def decide(
    problem: Problem, device: Device, table: Table, *, sm_count: int | None = None, dense: bool = True,
    unmeasured: bool = False, without: str = "",
) -> Decision:  # fmt: skip
    """Return what ``problem`` should run on ``device``.

    Args:
        sm_count: SM budget; None for the whole GPU.
        dense: False if a row stride exceeds the row, which no Row was measured with.
        unmeasured: run predicted rows, neighbours and the default Config without a measurement that backs them.
        without: why the cuBLASLt algorithm that a Row names can't be run, where the caller has found so.

    Raises:
        InputError: ``sm_count`` is no integer from 1 to the device's.
    """
    budget = sm_budget(sm_count, device)
    to_torch = Decision(source="torch", problem=problem, sm_count=device.sm_count, reason="", arch=device.arch)
    if device.arch is None:
        return replace(to_torch, reason=f"no kernels are generated for {device.name or device.gpu}")
    broken = problem_violations(problem)
    if broken:
        return replace(to_torch, reason="; ".join(broken))
    key = Key.of(problem, arch=device.arch, gpu=device.gpu, sm_count=budget)
    exact = table.by_key.get(key)
    picks = [
        _from_exact(exact, to_torch, problem, device, budget, dense, without) if exact is not None else None,
        None if exact is not None and exact.status == "measured" else _from_neighbours(key, table, to_torch, problem),
    ]
    measured = next((pick for pick in picks if pick is not None and pick.status == "measured"), None)
    if measured is not None and (dense or measured.config is None):
        return measured
    if measured is not None:
        why = "its row strides are not the measured ones"
        if not unmeasured:
            return replace(
                to_torch, row=measured.row, reason=f"a row for this shape exists, but {why}; pass contiguous tensors"
            )
        return replace(
            measured, source="nearest", slowdown_bound=None, regret_bound=None, reason=f"{measured.reason}, but {why}"
        )
    return _unmeasured(exact, key, device, table, to_torch, problem, unmeasured)


def sm_budget(sm_count: int | None, device: Device) -> int:
    """Return the SMs to occupy: the whole GPU for None.

    Raises:
        InputError: no integer from 1 to the device's SM count.
    """
    if sm_count is None:
        return device.sm_count
    if isinstance(sm_count, bool) or not isinstance(sm_count, int) or not 1 <= sm_count <= device.sm_count:
        raise InputError(
            f"sm_count must be an integer from 1 to the {device.sm_count} SMs of {device.name or device.gpu}, got {sm_count!r}"
        )
    return sm_count


def _from_exact(
    row: Row, to_torch: Decision, problem: Problem, device: Device, budget: int, dense: bool, without: str
) -> Decision | None:
    """Return the decision a Row for exactly this question makes, None if it is no measured one."""
    aside = ""
    if row.choice == "cublaslt":
        assert row.cublaslt is not None
        if not dense:
            without = without or "its cuBLASLt algorithm is for dense rows"
        elif budget < device.sm_count:
            without = without or "its cuBLASLt algorithm keeps to no SM budget"
        without = without or strange(row, device)
        ratio = row.ratio("cublaslt")
        if not without and ratio is not None:
            return replace(
                to_torch, source="exact", row=row, algorithm=row.cublaslt.algorithm, slowdown_bound=1 / ratio, regret_bound=0.0,
                reason=f"cuBLASLt's algorithm {_measured(row, 'cublaslt')}, the best kernel {_measured(row, 'autogemm')}",
            )  # fmt: skip
        aside = f"; {without}"
    refused = _refusal(row, problem, budget)
    if refused:
        reason = f"the row for this shape is unusable: {refused}{aside}"
        return replace(to_torch, row=row, reason=reason) if row.measurement else None
    ratio = row.ratio()
    if ratio is None:
        return None
    what = f"{_measured(row, 'autogemm')} on this shape{aside}"
    if row.fallback == "cublas":
        return replace(to_torch, row=row, slowdown_bound=1.0, reason=f"cuBLAS is faster: the best kernel {what}")
    return replace(
        to_torch, source="exact", row=row, config=row.config, sm_count=budget, slowdown_bound=1 / ratio,
        regret_bound=row.race.regret if row.race is not None else None, reason=what,
    )  # fmt: skip


def _measured(row: Row, choice: Choice) -> str:
    return f"measured {row.ratio_text(choice)} x cuBLAS"


def _refusal(row: Row, problem: Problem, budget: int) -> str:
    """Return why the Row's Config may not run ``problem`` on ``budget`` SMs; empty if it may."""
    broken = violations(row.config, row.key.arch, problem)
    cluster = geometry(row.config, row.key.arch).cluster_ctas
    if cluster > budget:
        broken.append(f"its clusters of {cluster} CTAs need as many SMs, the budget is {budget}")
    if row.check is not None and not row.check.passed:
        broken.append(f"its kernel failed the CPU check ({', '.join(row.check.findings)})")
    return "; ".join(broken)


def _from_neighbours(key: Key, table: Table, to_torch: Decision, problem: Problem) -> Decision | None:
    """Return a neighbour's Config if measurements prove it no slower than cuBLAS here, else None.

    No kernel takes longer on a shape than on one that is at least as large in every extent, and cuBLAS takes no less than on
    one that is at most as large. So time here / cuBLAS here <= time above / cuBLAS below, up to TRANSFER_SLACK.
    """
    same = [
        row for row in table.family(key)
        if row.key.gpu == key.gpu and row.key.sm_count == key.sm_count and row.measurement is not None
    ]  # fmt: skip
    above = [
        row for row in same if _within(key, row.key) and row.fallback == "autogemm" and not _refusal(row, problem, key.sm_count)
    ]
    below = [row for row in same if _within(row.key, key)]
    if not above or not below:
        return None
    upper = min(above, key=lambda row: (row.time_s, row.config.id))
    lower = max(below, key=lambda row: (_baseline_s(row), row.key.problem.shape))
    best = max(min(row.time_s, _baseline_s(row), *([row.cublaslt.time_s] if row.cublaslt else [])) for row in below)
    longest_s, baseline_s = upper.time_s * (1 + TRANSFER_SLACK), _baseline_s(lower)
    if longest_s > baseline_s:
        return None
    slowdown, regret = longest_s / baseline_s, longest_s / best - 1
    return replace(
        to_torch, source="nearest", row=upper, config=upper.config, sm_count=key.sm_count, slowdown_bound=slowdown,
        regret_bound=regret,
        reason=f"no row for this shape, but one for {upper.key.problem.shape}, {upper.time_s * 1e6:.1f} us, where cuBLAS needs "
        f"{baseline_s * 1e6:.1f} us even for {lower.key.problem.shape}: at most {slowdown:.2f} of cuBLAS's time here, "
        f"at most {regret * 100:.0f} % over the best",
    )  # fmt: skip


def _within(inner: Key, outer: Key) -> bool:
    return inner.m <= outer.m and inner.n <= outer.n and inner.k <= outer.k


def _baseline_s(row: Row) -> float:
    assert row.measurement is not None
    return statistics.median(row.measurement.warm.baseline_s)


def _unmeasured(
    exact: Row | None, key: Key, device: Device, table: Table, to_torch: Decision, problem: Problem, allowed: bool
) -> Decision:
    """Return the pick that no measurement backs, if ``allowed``; otherwise torch.matmul, with what could have been."""
    launched = replace(to_torch, sm_count=key.sm_count)
    if key.sm_count < device.sm_count:
        whole = table.by_key.get(replace(key, sm_count=device.sm_count))
        if (
            whole is not None
            and whole.fallback == "autogemm"
            and whole.measurement
            and not _refusal(whole, problem, key.sm_count)
        ):
            # The caller asked to leave SMs free, which cuBLAS can't do; the kernel tuned for the whole GPU can.
            return replace(
                launched, source="nearest", row=whole, config=whole.config,
                reason=f"no row for {key.sm_count} SMs; the kernel measured {whole.ratio():.3f} x cuBLAS on "
                f"{device.sm_count} SMs keeps to the budget, its time there is not measured",
            )  # fmt: skip
    if exact is not None and not (refused := _refusal(exact, problem, key.sm_count)):
        assert exact.prediction is not None
        what = f"the row for this shape is predicted by {exact.prediction.model}, not measured"
        if allowed:
            return replace(launched, source="exact", row=exact, config=exact.config, reason=what)
        return replace(to_torch, row=exact, reason=f"{what}; tune on this GPU, or set AUTOGEMM_UNMEASURED=1 to run it")
    why = f"the row for this shape is unusable: {refused}" if exact is not None else _why_no_row(key, table)
    default = DEFAULT_CONFIG[key.arch]
    if allowed and not violations(default, key.arch, problem) and geometry(default, key.arch).cluster_ctas <= key.sm_count:
        return replace(
            launched, source="default", config=default, reason=f"{why}; the default config of {key.arch}, not measured"
        )
    return replace(to_torch, reason=f"{why}; to tune it: autogemm tune --shape {problem.shape}")


def _why_no_row(key: Key, table: Table) -> str:
    """Return why no row answers ``key``, naming rows of the same shape that answer something else."""
    near = [row for row in table.rows if (row.key.m, row.key.n, row.key.k) == (key.m, key.n, key.k)]
    other = sorted({str(row.key) for row in near})
    if not other:
        return "no row for this shape, and none around it that bounds its time"
    return f"no row for this question; rows of this shape answer {'; '.join(other[:3])}"
