#!/usr/bin/env bash
# Set up, then run every test; style and types are tests too (tests/test_repo.py).
# Arguments go to pytest: scripts/test.sh tests/test_cli.py -k shape
set -eu
cd "$(dirname "$0")/.."
bash scripts/setup.sh

# Tests of shared storage start a PostgreSQL server of their own; they skip with a reason where there is none.
if ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null && ! command -v initdb >/dev/null &&
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "test: installing PostgreSQL" >&2
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql; } \
        >/dev/null 2>&1 || echo "test: PostgreSQL can't be installed here; its tests will skip" >&2
fi

# Two test processes share the cores; more threads in each would only fight.
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# loadfile: what the tests of one file share, such as compiled kernels, is made in one process only.
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
