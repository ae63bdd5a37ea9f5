"""The backends of the fused operations, and the choice among them.

A backend of your own is a module here with the functions of `chunked`. `MODULES` of `rlplus.loss.library` has its name,
which `backend=` then takes; for `train.backend` the type there needs it, too:

    # rounded.py, for `linear_policy_loss(..., backend="rounded")`
    from rlplus.loss.backends.chunked import logprob, logprob_backward, policy_loss as exact

    def policy_loss(head, constants, objective, *options):
        return exact(head, constants._replace(advantage=constants.advantage.round(decimals=2)), objective, *options)
"""
