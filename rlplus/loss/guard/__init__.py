"""What keeps a wrong result from being returned: verdicts on kernels, full precision, advice with errors."""
