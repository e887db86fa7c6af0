#!/usr/bin/env bash
# torchdata's node loader, resumed at an epoch's end, gives the state of that end for all of the next epochs.
#
# Guess, written down before: a torchdata.nodes.Loader that was given the state of the end of epoch 1 begins epoch 2
# with its first batch, and state_dict() counts on from there: three batches, three states, as without a resume.
#
# Seen with torchdata 0.11.0 and torch 2.13.0 (CPU build): it begins epoch 2 with the first batch, but state_dict()
# returns what it was given, after every batch of that epoch and of the one behind it. A training that is saved and
# killed there goes back to the end of epoch 1 each time, and nothing says so. With restart_on_stop_iteration=False the
# resumed loader first yields an empty epoch, and its states then count on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "torchdata==0.11.0" "numpy==2.4.6"
"$folder/env/bin/python" -W ignore - <<'PY'
import sys

import torchdata.nodes as nodes


def make():
    return nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(6)), 2))


def epoch(loader):
    return [(batch, str(loader.state_dict())) for batch in loader]


whole = make()
epoch(whole)
end = whole.state_dict()
uninterrupted = epoch(whole)
resumed = make()
resumed.load_state_dict(end)
found = [epoch(resumed), epoch(resumed)]
same_batches = [[batch for batch, _ in lived] for lived in found] == [
    [batch for batch, _ in uninterrupted]
] * 2
states = {state for lived in found for _, state in lived}
print("uninterrupted, epoch 2:", len({state for _, state in uninterrupted}), "states of 3 batches")
print("resumed at the end of epoch 1:", len(states), "state(s) of 6 batches in two epochs")
sys.exit(0 if same_batches and states == {str(end)} else "this has changed")
PY
