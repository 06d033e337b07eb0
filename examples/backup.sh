#!/usr/bin/env bash
# Copies a run directory while the run works: examples/backup.sh RUN_DIR BACKUP
# The order matters. Checkpoints first, the journal last: a resume needs a journal at least as new as the checkpoint that it loads.
# The journal of a running run is copied by SQLite, with what is only in its -wal file; `cp` would miss that.
set -euo pipefail
run=${1:?usage: examples/backup.sh RUN_DIR BACKUP} backup=${2:?usage: examples/backup.sh RUN_DIR BACKUP}
[ -f "$run/journal.sqlite" ] || { echo "backup: $run has no journal.sqlite, so it is not a run" >&2; exit 2; }
install -d -m 700 "$backup" # it has every conversation, and keys
for attempt in 1 2 3; do
    rm -rf "$backup/checkpoints"
    cp -a "$run/checkpoints" "$backup/" 2>/dev/null || true # none yet, or a pruned one: the test below decides
    find "$run" -mindepth 1 -maxdepth 1 ! -name checkpoints ! -name 'journal.sqlite*' -exec cp -a {} "$backup/" \;
    rm -f "$backup/journal.sqlite"
    sqlite3 "$run/journal.sqlite" ".timeout 60000" ".backup '$backup/journal.sqlite'"
    newest=$(find "$backup/checkpoints" -mindepth 1 -maxdepth 1 -name 'step_*' 2>/dev/null | sort -V | tail -n 1)
    # While the run keeps the newest checkpoint of the copy, its journal keeps what that checkpoint needs.
    if [ -z "$newest" ] || [ -d "$run/checkpoints/${newest##*/}" ]; then
        echo "backup: $backup has ${newest:+${newest##*/} and }the journal since then"
        exit 0
    fi
done
echo "backup: checkpoints are pruned faster than they are copied. Way out: raise checkpoint.keep_last, and copy again" >&2
exit 1
