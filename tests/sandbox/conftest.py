"""The sandboxes for the tests in this folder."""

from sandboxes import closed, sandbox

__all__ = ["closed", "sandbox"]
