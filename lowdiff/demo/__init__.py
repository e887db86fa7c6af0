"""Demo: launch ``lowdiff.examples.ddp_gpt``, kill it, resume it, compare all bits."""
