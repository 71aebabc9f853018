#!/usr/bin/env bash
# Install autogemm, everything it can use and its development tools into .venv, at the versions of constraints.txt.
# Safe to run again: it returns at once where nothing changed. PYTHON=python3.12 picks another interpreter.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
    echo "setup: $python is $("$python" --version 2>&1); autogemm needs Python 3.10 to 3.13; set PYTHON" >&2
    exit 2
}

stamp=.venv/.autogemm-setup
wanted=$({ "$python" --version; pwd; cat pyproject.toml constraints.txt scripts/setup.sh; } | sha256sum)
if [ -x .venv/bin/autogemm ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

echo "setup: installing into .venv (a few minutes on a new machine)" >&2
rm -f "$stamp"
"$python" -m venv .venv
# The variables reach the isolated environment that builds the package too; which of them counts depends on pip's age.
export PIP_CONSTRAINT="$PWD/constraints.txt" PIP_BUILD_CONSTRAINT="$PWD/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1
.venv/bin/python -m pip install --quiet --quiet --no-compile -e '.[tune,report,postgres,dev]'
echo "$wanted" >"$stamp"
echo "setup: done; try .venv/bin/autogemm doctor" >&2
