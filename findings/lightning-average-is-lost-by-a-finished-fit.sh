#!/usr/bin/env bash
# Lightning, EMAWeightAveraging: fit() of a finished training's last checkpoint hands out the weights without the average.
#
# Guess, written down before: a training with EMAWeightAveraging ends with the averaged weights in the model. The same
# script started again with the checkpoint that was saved last (same max_epochs) ends at once, and its model has these
# weights too: the average lies in the checkpoint, and is loaded from there.
#
# Seen with lightning 2.6.6 and torch 2.13.0 (CPU build): the first fit ends with the average in the model, and the
# checkpoint's state_dict is that average. The second fit ends at once with the weights that trained, of
# current_model_state: they are put into the model when the checkpoint is loaded, and what puts the average there, on_train_end
# of the callback, does not come for a training that is finished. A job that is started again after its end so
# evaluates or exports another model, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "lightning==2.6.6" "numpy==2.4.6"
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import logging
import sys

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def fit(ckpt_path=None):
    lightning.seed_everything(1, verbose=False)
    model = BoringModel()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=8, limit_val_batches=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[EMAWeightAveraging(decay=0.9), ModelCheckpoint("saved", save_last=True)],
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return model.layer.weight.detach().clone()


ended = fit()
saved = torch.load("saved/last.ckpt", weights_only=False)
again = fit("saved/last.ckpt")
found = {
    "the checkpoint's state_dict is the average": torch.equal(saved["state_dict"]["layer.weight"], ended),
    "the second fit ends with the average": torch.equal(again, ended),
    "it ends with the checkpoint's current_model_state": torch.equal(
        again, saved["current_model_state"]["layer.weight"]
    ),
}
print("lightning", lightning.__version__, "torch", torch.__version__)
for what, is_so in found.items():
    print(f"{what}: {is_so}")
sys.exit(list(found.values()) != [True, False, True])
PY
