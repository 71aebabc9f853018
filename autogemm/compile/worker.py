"""Body of one compile worker: a JSON request per line in, a JSON answer per line out, until stdin ends (see pool.py)."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from typing import Any, Final

from ..config import Config
from ..errors import AutogemmError, CompileError
from .compiler import compile_config

_LONGEST_REASON: Final = 600  # characters


def main() -> None:
    """Serve requests until stdin ends."""
    # Answers go to what was stdout; anything that libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``{}`` once the requested kernel is in the cache, else the error's class and text."""
    try:
        compile_config(Config.from_knobs(request["knobs"]), request["arch"], request["dtype"])
    except AutogemmError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except Exception as error:  # whatever TVM raises for a kernel it can't lower: this candidate's fault, not the pool's
        return {"error": CompileError.__name__, "text": f"can't be generated: {_summary(error)}"}
    return {}


def _summary(error: Exception) -> str:
    """Return the exception in one line: TVM's are tables of tens of kilobytes whose first row says what is wrong."""
    text = "".join(traceback.format_exception_only(error))
    return re.sub(r"[\s|+\-]{2,}|\s", " ", text).strip()[:_LONGEST_REASON]


if __name__ == "__main__":
    main()
