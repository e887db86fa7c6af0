"""The main job, end to end: launch ``lowdiff.examples.ddp_gpt``, kill it, resume, compare bits."""
