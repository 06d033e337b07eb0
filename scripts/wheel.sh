#!/usr/bin/env bash
# Builds the wheel of the last commit: scripts/wheel.sh [FOLDER], by default dist. TAG=v1.2.3: refuses another version.
set -euo pipefail
out=$(realpath -m "${1:-dist}")
cd "$(dirname "$0")/.."

version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' asyncrl/__init__.py)
if [ -n "${TAG:-}" ] && [ "$TAG" != "v$version" ]; then
    echo "wheel: the tag is $TAG, and asyncrl/__init__.py has version $version. Way out: set __version__, commit, and tag that commit" >&2
    exit 2
fi
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git clone --quiet . "$source" # a build writes next to the sources
"${PYTHON:-python3}" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$out" "$source"
