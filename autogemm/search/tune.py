"""Tuner: from a Problem to a Row in the database."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, get_args

from .. import __version__
from ..arch import GPUS, ArchName, Gpu
from ..binary import Binary, read_folder
from ..compile.compiler import cached_binary, compile_many
from ..compile.pool import core_count
from ..compile.toolchain import toolchain
from ..config import Config
from ..constraints import problem_violations, violations
from ..database import Database
from ..device import Device
from ..errors import CompileError, DatabaseError, IllegalConfig, InputError, MissingDependency
from ..kernel_store import keep
from ..predict.closed_form import model_hash
from ..problem import Problem
from ..record import Key, Provenance, Row
from ..results import Measurement, Prediction
from ..settings import cache_folder
from ..space import Space, load_space
from .candidates import WORKING_SET, entrants, per_binary, ranked, working_set
from .evaluate import Bench, DeviceEvaluator, Evaluator, ModelEvaluator
from .gate import SimulatorGate, simulator_hash
from .loop import BATCH, Search
from .progress import Budget, Done, Meter, Note, Planned, Progress
from .storage import Sampler
from .study import Axes, OptunaStore, open_local, open_shared
from .supply import CompilingSupply, FolderSupply, Supply
from .trial import MemoryStore, TrialStore

# Studies in a shared database are called so; ``autogemm worker`` looks for them.
STUDY_PREFIX: Final = "autogemm/"

# A space up to this size is tried as a whole in model order, which beats every sampler there (docs/search.md).
EXHAUSTIVE_LIMIT: Final = 4096

# Rows of the nearest shapes whose Configs are tried whatever the model says of them.
PROVEN_ROWS: Final = 4

Kind = Literal["model", "device"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to search; every field has a sensible default.

    Attributes:
        space: candidate Configs; the arch's own space by default.
        candidates: folder of compiled, checked kernels to use in place of a compiler.
        storage: database URL of studies that several workers share; journal files in the cache folder by default.
        sampler: ``order`` tries the model's ranking; ``tpe`` and ``random`` suggest points after the model's best. None takes
            ``order`` unless the space is larger than EXHAUSTIVE_LIMIT.
        seed: of the sampler.
        workers: compile and check processes, one per core by default.
        check: refuse what the CPU execution finds fault with.
        fresh: search again although a valid Row is there, without what an earlier study remembers.
        cublaslt: time the best of cuBLASLt's own algorithms beside the winner, for dispatch to run where it is faster.
        warm_up_s: seconds to keep the GPU busy before the first measurement, so that it is as hot as in sustained use.
    """

    space: Space | None = None
    candidates: Path | None = None
    storage: str | None = None
    sampler: Sampler | None = None
    seed: int = 0
    workers: int | None = None
    check: bool = True
    fresh: bool = False
    cublaslt: bool = True
    warm_up_s: float = 0.0


def _require_possible(options: Options) -> None:
    if not isinstance(options.seed, int) or not 0 <= options.seed < 2**32:
        raise InputError(f"seed={options.seed} is outside 0 to 2**32 - 1")
    if options.sampler is not None and options.sampler not in get_args(Sampler):
        raise InputError(f"unknown sampler {options.sampler!r}; use {', '.join(get_args(Sampler))}")
    if options.workers is not None and (not isinstance(options.workers, int) or options.workers < 1):
        raise InputError(f"workers={options.workers}; use at least 1")


class Tuner:
    """Tunes Problems on one device, one after the other; keeps compilers, checkers and the GPU's worker between them."""

    def __init__(
        self, device: Device, *, evaluator: Kind = "model", device_index: int = 0, sm_count: int | None = None,
        db: Database | None = None, options: Options | None = None, bench: Callable[[Problem], Bench] | None = None,
    ) -> None:  # fmt: skip
        """Prepare; nothing is compiled or timed yet.

        Args:
            evaluator: ``model`` predicts, on any machine; ``device`` measures on GPU ``device_index``.
            sm_count: SM budget; all SMs of the device by default.
            db: where Rows go; the folder that settings name by default.
            bench: makes what times kernels for one Problem; a DeviceBench by default.

        Raises:
            InputError: no kernels are generated for the device, or an option can't be used.
        """
        if device.arch is None:
            raise InputError(f"no kernels are generated for {device.name or device.gpu}; supported: sm_90a and sm_100a")
        self.device, self.arch, self.kind = device, device.arch, evaluator
        self.sm_count = device.sm_count if sm_count is None else sm_count
        if not isinstance(self.sm_count, int) or not 1 <= self.sm_count <= device.sm_count:
            raise InputError(f"sm_count={sm_count} is outside 1 to {device.sm_count}, the SMs of {device.gpu}")
        self.database = db if db is not None else Database()
        self.options = options if options is not None else Options()
        _require_possible(self.options)
        if evaluator not in get_args(Kind):
            raise InputError(f"unknown evaluator {evaluator!r}; use {' or '.join(get_args(Kind))}")
        self._device_index, self._make_bench = device_index, bench
        self._own_bench: Bench | None = None
        self._supplies: dict[str, Supply] = {}
        self.gpu = _modelled(device)
        if evaluator == "model" and (self.gpu is None or self.gpu.slug != device.gpu):
            raise InputError(f"no model of {device.gpu}; predictions are for {', '.join(GPUS)}")

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End background work and free the GPU."""
        for supply in self._supplies.values():
            supply.close()
        if self._own_bench is not None:
            self._own_bench.close()

    def tune(self, problem: Problem, budget: Budget | None = None, progress: Progress = lambda event: None) -> Row:
        """Search for the best Config of ``problem``, store the Row and return what the database now holds for it.

        Args:
            progress: is told what happens; called in this thread.

        Raises:
            InputError: the problem, the budget or a file can't be used; raised before anything is spent.
            NothingFound: no candidate is usable.
        """
        began, options = time.monotonic(), self.options
        budget = budget if budget is not None else Budget()
        key = self.key(problem)
        if self.kind == "model" and budget.target is not None:
            raise InputError("--target compares with cuBLAS, which only a measurement can; leave it out for predictions")
        self.database.require_usable(key)
        held = self.database.lookup(key)
        if self.kind == "model" and held is not None and held.status == "measured" and not self.options.fresh:
            progress(Note(text="a measured row is there, which no prediction replaces"))
            progress(Done(row=held, reused=True, compiled=0, elapsed_s=time.monotonic() - began))
            return held
        supply = self.supply(problem.dtype)
        compiled_before = supply.compiled
        order, pool = self._plan(problem, supply, budget)
        axes = Axes.of([*order, *pool]) if self._sampler(len(pool) or len(order)) != "order" else None
        store = self._store(key, axes, progress)
        try:
            if held is not None and self._still_good(held, budget, store, order, progress):
                progress(Done(row=held, reused=True, compiled=0, elapsed_s=time.monotonic() - began))
                return held
            queued = order if axes is None else order[:WORKING_SET]
            finished = len(store.finished())
            if isinstance(store, OptunaStore) and options.storage is not None:
                store.set_attribute("task", self._task(problem, len(order)))
                store.set_attribute("open", True)
            store.enqueue(queued)
            progress(Planned(key=key, evaluator=self.kind, candidates=len(order), finished=finished))
            evaluator = self.evaluator(problem)
            try:
                choice = Search(
                    order=order, pool=pool, evaluator=evaluator, supply=supply, store=store, meter=Meter(budget),
                    progress=progress, batch=BATCH if self.kind == "device" and self.options.storage is None else 1,
                ).run()  # fmt: skip
            finally:
                evaluator.close()
            row = Row(
                key=key, config=choice.candidate.config, evidence=choice.evidence, check=choice.candidate.check,
                race=choice.race, cublaslt=choice.cublaslt, provenance=provenance(choice.candidate.binary, choice.evidence),
            )  # fmt: skip
            if row.measurement is not None:
                keep(choice.candidate.binary)  # dispatch finds it there, also where there is no compiler
            row = self.database.put(row)
            if isinstance(store, OptunaStore) and options.storage is not None:
                store.set_attribute("open", False)
        finally:
            store.close()
        compiled = supply.compiled - compiled_before
        progress(Done(row=row, reused=False, compiled=compiled, elapsed_s=time.monotonic() - began))
        return row

    def key(self, problem: Problem) -> Key:
        """Return the Key that ``tune`` answers for ``problem``.

        Raises:
            IllegalConfig: no generated kernel can take the problem.
        """
        broken = problem_violations(problem)
        if broken:
            raise IllegalConfig(f"problem {problem}", broken)
        return Key.of(problem, arch=self.arch, gpu=self.device.gpu, sm_count=self.sm_count)

    def _plan(self, problem: Problem, supply: Supply, budget: Budget) -> tuple[list[Config], list[Config]]:
        """Return (Configs to try in order, Configs that may follow as launch-time variants of the best)."""
        dtype = problem.dtype
        space = self.options.space if self.options.space is not None else load_space(self.arch)
        configs = space.configs(dtype)
        if isinstance(supply, FolderSupply):
            there = {config.binary for config in supply.configs}
            configs = [c for c in configs if c.binary in there] + [
                c for c in supply.configs if not violations(c, self.arch, problem)
            ]
            configs = list(dict.fromkeys(configs))
        configs = [config for config in configs if config.cta_group <= self.sm_count]
        order = ranked(problem, configs, self.gpu, self._predicted_sms) if self.gpu is not None else configs
        if self.kind == "device":
            firsts = per_binary(order)
            chosen = entrants(problem, firsts, self.gpu, self._predicted_sms) if self.gpu is not None else firsts
            # What won on the nearest shapes takes part whatever the model says of it.
            proven = {config.binary for config in self._proven(problem)} - {config.binary for config in chosen}
            chosen = chosen if budget.trials is None else chosen[: max(1, budget.trials - len(proven))]
            return chosen + [config for config in firsts if config.binary in proven], order
        assert self.gpu is not None
        size = WORKING_SET if budget.trials is None else budget.trials
        chosen = working_set(problem, order, self.gpu, size=size, is_cached=lambda config: is_cached(config, self.arch, dtype))
        return chosen, []

    def _proven(self, problem: Problem) -> list[Config]:
        """Return the Configs of the measured Rows nearest to ``problem``."""
        try:
            near = self.database.nearest(self.key(problem))
        except DatabaseError:
            return []  # of another GPU's file; it is not this search that must stop for it
        return [n.row.config for n in near if n.row.status == "measured"][:PROVEN_ROWS]

    @property
    def _predicted_sms(self) -> int | None:
        return self.sm_count if self.gpu is not None and self.sm_count <= self.gpu.sm_count else None

    def _sampler(self, points: int) -> Sampler:
        if self.options.sampler is not None:
            return self.options.sampler
        return "order" if points <= EXHAUSTIVE_LIMIT or self.kind == "model" else "tpe"

    def supply(self, dtype: str) -> Supply:
        """Return the source of candidates for ``dtype``, the same one for all Problems.

        Raises:
            InputError, MissingDependency: no usable candidates folder, or no compiler.
        """
        if dtype not in self._supplies:
            self._supplies[dtype] = self._new_supply(dtype)
        return self._supplies[dtype]

    def _new_supply(self, dtype: str) -> Supply:
        if self.options.candidates is not None:
            binaries = [
                b for b in read_folder(self.options.candidates) if (b.manifest.arch, b.manifest.dtype) == (self.arch, dtype)
            ]
            if not binaries:
                raise InputError(f"{self.options.candidates} holds no {dtype} kernel for {self.arch}")
            return FolderSupply(binaries, checked=self.options.check)
        toolchain()  # raises now if there is no compiler
        workers = core_count() if self.options.workers is None else self.options.workers
        return CompilingSupply(
            self.arch, dtype,
            compile_many=lambda configs: compile_many(configs, self.arch, dtype, workers=workers),
            is_cached=lambda config: is_cached(config, self.arch, dtype),
            gate=SimulatorGate(workers) if self.options.check else None,
            check_ahead=self.kind == "device",
        )  # fmt: skip

    def _store(self, key: Key, axes: Axes | None, progress: Progress) -> TrialStore:
        options = self.options
        sampler = self._sampler(0 if axes is None else len(axes.members))
        name = self._study_name(key, sampler, axes)
        if options.storage is not None:
            return open_shared(options.storage, STUDY_PREFIX + name, sampler=sampler, axes=axes, seed=options.seed)
        try:
            return open_local(
                cache_folder() / "studies", name, sampler=sampler, axes=axes, seed=options.seed, fresh=options.fresh,
                waiting=lambda: progress(Note(text="another process is tuning this shape; waiting for it")),
            )  # fmt: skip
        except MissingDependency:
            progress(Note(text="Optuna is not installed, so a killed search starts anew; install autogemm[tune]"))
            return MemoryStore()

    def _study_name(self, key: Key, sampler: Sampler, axes: Axes | None) -> str:
        """Return a name that changes with everything on which the value of a finished trial depends."""
        parts: list[object] = [*self.supply(key.dtype_a).origin, sampler]
        parts.append(self.device.driver if self.kind == "device" else model_hash())
        parts.append(simulator_hash() if self.options.check else "unchecked")
        parts.append(sorted(c.id for c in axes.members) if axes is not None else "")
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
        return f"{self.kind}-{key.gpu}-{key.sm_count}-{key.dtype}-{key.layout}-{key.epilogue}-{key.problem.shape}-{digest}"

    def _task(self, problem: Problem, candidates: int) -> dict[str, object]:
        """Return what a worker must know to run this study's trials."""
        return {
            "m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype, "layout": problem.layout,
            "epilogue": problem.epilogue, "gpu": self.device.gpu, "sm_count": self.sm_count, "kind": self.kind,
            "generator": self.supply(problem.dtype).origin[0], "candidates": candidates,
        }  # fmt: skip

    def _still_good(self, held: Row, budget: Budget, store: TrialStore, configs: list[Config], progress: Progress) -> bool:
        """Return whether a measured Row answers the question already."""
        if self.options.fresh or self.kind != "device" or held.status != "measured":
            return False
        generator, compiler = self.supply(held.key.dtype_a).origin
        stale = held.stale(
            generator=generator, compiler=compiler, driver=self.device.driver, cublaslt=self.device.cublaslt
        )  # fmt: skip
        if stale:
            progress(Note(text=f"the row there is stale ({'; '.join(stale)}); tuning anew"))
            return False
        ratio = held.ratio()
        if budget.target is not None and ratio is not None and ratio < budget.target:
            return False
        tried = {trial.config for trial in store.finished()}
        new = {config.binary for config in configs} - {config.binary for config in tried}
        if not tried or (not new and not store.open_trials()):
            progress(Note(text="a valid measured row is there already; to search again: --fresh"))
            return True
        progress(Note(text=f"{len(new)} kernels have not been tried on this shape yet"))
        return False

    def evaluator(self, problem: Problem, sm_count: int | None = None) -> Evaluator:
        """Return what tries candidates for ``problem``; on a GPU, one Problem at a time.

        Args:
            sm_count: SM budget; the Tuner's own by default.
        """
        if self.kind == "model":
            assert self.gpu is not None
            return ModelEvaluator(problem, self.gpu, self._predicted_sms)
        # No algorithm keeps to an SM budget.
        cublaslt = self.options.cublaslt and self.sm_count == self.device.sm_count
        if self._make_bench is not None:
            return DeviceEvaluator(self._make_bench(problem), cublaslt=cublaslt)
        from ..measure.device_bench import DeviceBench

        budget = self.sm_count if sm_count is None else sm_count
        if isinstance(self._own_bench, DeviceBench):
            self._own_bench.sm_count = budget
            self._own_bench.open(problem)
        else:
            self._own_bench = DeviceBench(problem, device=self._device_index, sm_count=budget)
            if self.options.warm_up_s > 0:
                self._own_bench.warm_up(self.options.warm_up_s)
        return DeviceEvaluator(self._own_bench, owns_bench=False, cublaslt=cublaslt)


def tune(
    problem: Problem, device: Device, *, evaluator: Kind = "model", device_index: int = 0, sm_count: int | None = None,
    db: Database | None = None, budget: Budget | None = None, options: Options | None = None,
    progress: Progress = lambda event: None,
) -> Row:  # fmt: skip
    """Tune one Problem; arguments and errors as for ``Tuner`` and ``Tuner.tune``."""
    with Tuner(device, evaluator=evaluator, device_index=device_index, sm_count=sm_count, db=db, options=options) as tuner:
        return tuner.tune(problem, budget, progress)


def provenance(binary: Binary, evidence: Measurement | Prediction) -> Provenance:
    """Return what made a Row whose kernel is ``binary``."""
    measured = evidence.environment if isinstance(evidence, Measurement) else None
    return Provenance(
        autogemm=__version__, generator=binary.manifest.generator, compiler=binary.compiler,
        driver=None if measured is None else measured.driver, tvm=_version("apache-tvm"),
        torch=None if measured is None else measured.torch,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) if measured is None else measured.date,
    )  # fmt: skip


def is_cached(config: Config, arch: ArchName, dtype: str) -> bool:
    """Return whether ``config`` was compiled before, successfully or not."""
    try:
        return cached_binary(config, arch, dtype) is not None
    except CompileError:
        return True


def _modelled(device: Device) -> Gpu | None:
    """Return the GPU whose constants predict for ``device``; None for one that no model knows."""
    exact = GPUS.get(device.gpu)
    if exact is not None:
        return exact
    return next((gpu for gpu in GPUS.values() if gpu.arch == device.arch), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
