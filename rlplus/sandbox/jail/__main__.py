"""Start of this folder by path. It loads the modules under a name that no program imports, and sys.path stays clean."""

import importlib
import os
import sys

if __name__ == "__main__":
    package = sys.modules["_sandbox_jail"] = type(sys)("_sandbox_jail")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    if sys.path[:1] == package.__path__:  # Python puts the folder that it runs there
        del sys.path[0]
    importlib.import_module("_sandbox_jail.start").main()
