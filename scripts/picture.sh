#!/usr/bin/env bash
# Picture of a page in a real browser (Debian's package chromium): scripts/picture.sh PAGE.html OUT.png [WIDTH,HEIGHT]
set -eu
page=$(realpath "$1")
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync --hide-scrollbars --user-data-dir="$profile" --window-size="${3:-1240,2400}" \
    --virtual-time-budget=10000 --screenshot="$2" "file://$page" 2>&1 | grep -i written
