"""Releases of Triton beside the installed one: those that supported releases of torch pin."""

from pathlib import Path

import releases

PINNED = {  # tests/integrations/test_resolution.py asks the index for them
    "3.6.0": "torch 2.11.0",
    "3.7.0": "torch 2.12.0",
    "3.7.1": "torch 2.12.1 and 2.13.0",
}


def folder(version: str) -> Path:
    """Where that Triton can be imported from, alone. Skips the test where pip cannot get it."""
    return releases.folder("triton", version)
