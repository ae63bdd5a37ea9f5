"""The operations as users and torch see them; importing this package registers them under `torch.ops.rlplus`."""

import rlplus.loss.operations.linear_losses  # noqa: F401
