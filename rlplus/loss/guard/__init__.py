"""The guards against a wrong result: verdicts on kernels, full precision, and advice with errors."""
