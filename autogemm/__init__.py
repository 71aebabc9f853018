"""autogemm: an autotuning GEMM kernel generator.

The names below are imported when first used, so that ``import autogemm`` loads neither TVM nor Optuna nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name to the module that defines it.
_EXPORTS = {
    "AutogemmError": "errors", "CompileError": "errors", "DatabaseError": "errors", "IllegalConfig": "errors",
    "InputError": "errors", "LaunchError": "errors", "MissingDependency": "errors", "NothingFound": "errors",
    "UnsupportedOp": "errors",
    "Problem": "problem", "Config": "config", "Database": "database", "Row": "record", "Device": "device",
    "Decision": "decision",
    "matmul": "dispatch", "explain": "dispatch", "prepare": "dispatch", "use_database": "dispatch", "refresh": "dispatch",
    "linear": "layers", "patch": "layers", "load": "loading", "load_bundle": "bundle", "make_bundle": "bundle",
    "tune": "search.tune", "Budget": "search.progress", "check_config": "simulate.check", "check_primfunc": "simulate.check",
    "record_shapes": "shapes",
}  # fmt: skip

__all__ = ["__version__", *sorted(_EXPORTS)]

if TYPE_CHECKING:
    from .bundle import load_bundle as load_bundle
    from .bundle import make_bundle as make_bundle
    from .config import Config as Config
    from .database import Database as Database
    from .decision import Decision as Decision
    from .device import Device as Device
    from .dispatch import explain as explain
    from .dispatch import matmul as matmul
    from .dispatch import prepare as prepare
    from .dispatch import refresh as refresh
    from .dispatch import use_database as use_database
    from .errors import AutogemmError as AutogemmError
    from .errors import CompileError as CompileError
    from .errors import DatabaseError as DatabaseError
    from .errors import IllegalConfig as IllegalConfig
    from .errors import InputError as InputError
    from .errors import LaunchError as LaunchError
    from .errors import MissingDependency as MissingDependency
    from .errors import NothingFound as NothingFound
    from .errors import UnsupportedOp as UnsupportedOp
    from .layers import linear as linear
    from .layers import patch as patch
    from .loading import load as load
    from .problem import Problem as Problem
    from .record import Row as Row
    from .search.progress import Budget as Budget
    from .search.tune import tune as tune
    from .shapes import record_shapes as record_shapes
    from .simulate.check import check_config as check_config
    from .simulate.check import check_primfunc as check_primfunc


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
