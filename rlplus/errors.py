"""Errors that the command line shows as one message; here so that it can name them without importing an engine."""


class RunFailed(RuntimeError):
    """Training or the engine failed. The message says how: the command line shows it without a traceback."""
