#!/usr/bin/env bash
# ckpt-chaos with --crash-rank 1 kills no rank, and says PASS.
#
# Guess, written down before: with --ranks 2 --crash-rank 1 each kill point ends rank 1, as --crash-rank 0 ends
# rank 0; a script whose every rank overwrites its own checkpoint in place fails either way.
#
# Seen with ckpt-chaos 0.1.8 (Python 3.11): with --crash-rank 0 the script fails at kill points, exit code 1. With
# --crash-rank 1 all points are counted, each of their runs ends by itself with exit code 0, every resume is clean, and
# the tool exits with 0. The hook in the process goes by a variable with the rank, which only the built-in targets set.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "ckpt-chaos==0.1.8"
cat >"$folder/train.py" <<'PY'
import json
import os
import sys

path = os.path.join(sys.argv[1], f"rank-{os.environ['RANK']}.json")
os.makedirs(sys.argv[1], exist_ok=True)
done = 0
if os.path.exists(path):
    with open(path) as file:
        done = json.load(file)["step"]
for step in range(done + 1, 4):
    with open(path, "w") as file:
        json.dump({"step": step}, file)
PY
cd "$folder"
for rank in 0 1; do
  code=0
  "env/bin/ckpt-chaos" run --ranks 2 --crash-rank "$rank" --work "work-$rank" -- \
    "$folder/env/bin/python" train.py "{out}" >"said-$rank" 2>&1 || code=$?
  echo "$code" >"code-$rank"
done
"env/bin/python" - <<'PY'
import json
import sys
from pathlib import Path

found = {}
for rank in (0, 1):
    points = [json.loads(p.read_text()) for p in Path(f"work-{rank}").glob("pt_0*/result.json")]
    killed = sum(point["crashed"] for point in points)
    code = int(Path(f"code-{rank}").read_text())
    print(f"--crash-rank {rank}: {killed} of {len(points)} points ended a rank; exit code {code}")
    found[rank] = killed == len(points) > 0, killed, code
sys.exit(0 if found[0][0] and found[0][2] == 1 and found[1][1:] == (0, 0) else "this has changed")
PY
