"""What ``--import`` names: a module that registers the third parties' optimizers."""

from tests.crash.third_party import register

register()
