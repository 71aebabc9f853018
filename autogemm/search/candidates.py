"""Which Configs to try, in which order: the model ranks; a working set keeps later shapes from compiling anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from ..arch import Gpu
from ..arch import gpu as lookup_gpu
from ..config import NAMED, Config
from ..predict.closed_form import predict, rank
from ..problem import Problem

# Kernels compiled for a first prediction. Most serve the shapes to come: see working_set.
WORKING_SET: Final = 32

# A kernel that is already compiled is good enough for a prediction if the model puts it within this of the best.
CACHED_SLACK: Final = 0.02

# A measuring search tries the Binaries whose best prediction is within ENTRY_SLACK of the best, and at least ENTRY_LEAST.
# On 24 shapes on an H200 the first Config within 2 % of the best was always predicted within 1.02x (docs/search.md).
ENTRY_SLACK: Final = 1.5
ENTRY_LEAST: Final = 24

# Binaries of which the device evaluator also tries the other launch-time knobs, which cost no compilation. The model misjudges
# l2_group_size by more than the leaders differ: with 3 of them, kernels that an H200 sweep had 3 % ahead at 4096x4096x14336
# stayed untried at their best raster.
VARIED_BINARIES: Final = 16

# (N, K) of weight matrices between 2 K and 28 K wide, and token counts from decoding to training: see reference_problems.
_WEIGHTS: Final = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672), (7168, 2048))
_TOKENS: Final = (1, 16, 64, 128, 256, 1024, 4096)
_SQUARES: Final = (1024, 2048, 4096, 8192, 16384)


def reference_problems(dtype: str) -> list[Problem]:
    """Return shapes that a working set should serve: squares, and transformer weights at several token counts."""
    shapes = [(s, s, s) for s in _SQUARES] + [(m, n, k) for n, k in _WEIGHTS for m in _TOKENS]
    return [Problem(m=m, n=n, k=k, dtype=dtype) for m, n, k in shapes]


def ranked(problem: Problem, configs: Iterable[Config], gpu: Gpu, sm_count: int | None = None) -> list[Config]:
    """Return ``configs`` by predicted time, best first; equal times keep their order."""
    return [config for config, _ in rank(problem, configs, gpu, sm_count=sm_count)]


def entrants(problem: Problem, order: Sequence[Config], gpu: Gpu, sm_count: int | None = None) -> list[Config]:
    """Return the Configs of ``order``, best first, that a measuring search tries: see ENTRY_SLACK."""
    if not order:
        return []
    limit = ENTRY_SLACK * predict(problem, order[0], gpu, sm_count=sm_count).time_s
    return [
        config
        for i, config in enumerate(order)
        if i < ENTRY_LEAST or predict(problem, config, gpu, sm_count=sm_count).time_s <= limit
    ]


def per_binary(order: Sequence[Config]) -> list[Config]:
    """Return the first Config of each Binary, keeping the order."""
    return list({config.binary: config for config in reversed(order)}.values())[::-1]


def variants(best: Sequence[Config], configs: Iterable[Config]) -> list[Config]:
    """Return the members of ``configs`` that share a Binary with the first VARIED_BINARIES distinct Binaries of ``best``."""
    binaries = list(dict.fromkeys(config.binary for config in best))[:VARIED_BINARIES]
    by_binary: dict[Config, list[Config]] = {binary: [] for binary in binaries}
    for config in configs:
        if config.binary in by_binary:
            by_binary[config.binary].append(config)
    return [config for group in by_binary.values() for config in group]


def working_set(
    problem: Problem, order: Sequence[Config], gpu: Gpu, *, size: int = WORKING_SET, is_cached: Callable[[Config], bool]
) -> list[Config]:
    """Return about ``size`` Configs of distinct Binaries for ``problem``, best first, most of which serve other shapes too.

    Half are the model's best for this problem; half are chosen greedily so that for every reference shape the best member is
    fast. Once that many kernels are compiled, a later problem takes the best of those, and compiles new ones only if the
    model says that they are worth more than CACHED_SLACK.

    Args:
        order: Configs to choose from, best first for ``problem``.
        is_cached: whether a Config's Binary is compiled already.
    """
    firsts = per_binary(order)
    cached = [config for config in firsts if is_cached(config)]
    if len(cached) >= min(size, len(firsts)):
        best, best_cached = (predict(problem, c, gpu).time_s for c in (firsts[0], cached[0]))
        if best_cached <= best * (1 + CACHED_SLACK):
            return cached[:size]
        better = [c for c in firsts if not is_cached(c) and predict(problem, c, gpu).time_s < best_cached]
        chosen = {*better[: size // 8], *cached[: size - min(len(better), size // 8)]}
        return [config for config in firsts if config in chosen]
    named = {config.binary for config in NAMED[gpu.arch].values()}
    wanted = [config for config in firsts if config.binary in named]
    portfolio = _portfolio(frozenset(c.binary for c in firsts), gpu.slug, problem.dtype, size)
    by_binary = {config.binary: config for config in firsts}
    for config in [*firsts[: size // 2], *(by_binary[binary] for binary in portfolio), *firsts]:
        if len(wanted) >= size:
            break
        if config not in wanted:
            wanted.append(config)
    members = set(wanted)
    return [config for config in firsts if config in members]


@lru_cache(maxsize=8)
def _portfolio(binaries: frozenset[Config], gpu_slug: str, dtype: str, size: int) -> tuple[Config, ...]:
    """Return Configs such that each next one most reduces the mean predicted slowdown over the reference problems."""
    gpu = lookup_gpu(gpu_slug)
    configs = sorted(binaries, key=lambda config: config.id)
    slowdown: list[Mapping[Config, float]] = []
    for problem in reference_problems(dtype):
        times = {config: predict(problem, config, gpu).time_s for config in configs}
        best = min(times.values())
        slowdown.append({config: time / best for config, time in times.items()})
    chosen: list[Config] = []
    covered = [float("inf")] * len(slowdown)
    while len(chosen) < min(size, len(configs)):
        rest = [config for config in configs if config not in chosen]
        pick = min(rest, key=lambda c: sum(min(have, s[c]) for have, s in zip(covered, slowdown, strict=True)))
        chosen.append(pick)
        covered = [min(have, s[pick]) for have, s in zip(covered, slowdown, strict=True)]
    return tuple(chosen)
