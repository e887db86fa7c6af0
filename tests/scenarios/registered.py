"""What ``--import`` names: a module that registers the third parties' optimizers."""

from tests.scenarios.third_party import register

register()
