"""The random checkpoints of the families' tests, for training."""

from tests.models.conftest import one_thread, save_model, tools

__all__ = ["one_thread", "save_model", "tools"]
