"""Device: the GPU that a product runs on, as far as the choice of its kernel depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from .arch import DEFAULT_GPU, ArchName, arch, gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU at hand, or one that a question is asked for.

    Attributes:
        arch: compute architecture, None if no kernels are generated for it.
        gpu: slug, the folder under ``tuned/``.
        sm_count: streaming multiprocessors it has.
        name: for people.
        driver: driver version, None where unknown.
        torch: version of torch, and with it of the cuBLAS that kernels are compared with; None where unknown.
        power_limit_w: board power limit, None where unknown.
        cublaslt: version of the cuBLASLt library (cublasLtGetVersion()), 0 where there is none, None where unknown.
    """

    arch: ArchName | None
    gpu: str
    sm_count: int
    name: str = ""
    driver: str | None = None
    torch: str | None = None
    power_limit_w: float | None = None
    cublaslt: int | None = None

    @classmethod
    def of_gpu(cls, slug: str) -> Device:
        """Return the full part of a known GPU.

        Raises:
            InputError: no such GPU.
        """
        known = gpu(slug)
        return cls(arch=known.arch, gpu=known.slug, sm_count=known.sm_count, name=known.product)

    @classmethod
    def of_arch(cls, name: str) -> Device:
        """Return the GPU that stands for an arch when only the arch is given.

        Raises:
            InputError: no such arch.
        """
        return cls.of_gpu(DEFAULT_GPU[arch(name).name])
