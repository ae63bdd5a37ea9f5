"""The operations as users and torch see them; importing this package registers them under `torch.ops.rlplus`."""

from rlplus.loss.operations import linear_losses  # noqa: F401
