"""Names of the product's kernels: functions for Triton, interpreted or compiled, named `*_kernel` in rlplus.kernels."""

from importlib import import_module
from pathlib import Path

import rlplus

MODULES = [
    import_module(f"rlplus.kernels.{path.stem}") for path in (Path(rlplus.__file__).parent / "kernels").glob("*.py")
]
KERNELS = {
    name
    for module in MODULES
    for name, value in vars(module).items()
    if name.endswith("_kernel") and hasattr(value, "__getitem__")  # by which it is launched
}
