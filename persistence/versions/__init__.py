"""Versions of a model's weights, for those who serve it: a folder or an object store, its *target*.

A version is the model as it was after one step of a run, in the dtype that it is served in. An *anchor* holds all of it;
any other version holds the values that changed since its *base*, the version before it. Names in a target::

    publisher.json                        run whose weights these are; written once
    publisher.lock                        held by the process that publishes; in a folder only
    v0000000012.json                      manifest of version 12, written last: without it there is no version
    v0000000012-p0000.safetensors         its tensors, in parts
    v0000000012.withdrawn                 the run went back behind the step of this version

Numbers grow and are never used twice by those who see what is there; they are not steps. The manifest names its publisher,
a process, and a base is always the same publisher's: where somebody emptied a target, a number alone says nothing. A part of an anchor is a safetensors file that anyone can load.
A part of another version is one, too: a tensor of bytes for each tensor that changed (see `changes`). The manifest tells
run, incarnation, step, base, the bytes of each part, the XXH3 digest (128 bits) of the new content of each tensor, and, of
an anchor, which names are tied to which. Values are absolute, so a version may be applied twice; XOR or differences are not
used.

Nothing here imports torch on its own.
"""
