"""A sandbox for Python programs of unknown origin: no network, no files but Python's, limits on all resources.

    from rlplus.sandbox import Sandbox

    sandbox = Sandbox("auto", memory=512 << 20, seconds=5)
    for ended_well, text in sandbox.run("print(2 * int(input()))", ["3", "x"]):
        ...  # True, "6\\n"; then False, "ValueError: invalid literal for int() ..."
    passed, reason = sandbox.test("def double(x): return 2 * x", "", "assert double(3) == 6")

Kinds: "bubblewrap" (the command bwrap) and "namespaces" (jail, by Linux's user namespaces or as root). Both give a
program only a read-only Python and an empty folder in memory, and kill everything it started. "limits" has no
namespaces: a program has the user's files and network, and is limited in time, memory, processes and output.
SECURITY.md says what each promises.

The folder imports nothing but the standard library and itself: copied elsewhere, it works under any name.
"""

from .sandbox import KINDS, Sandbox

__all__ = ["KINDS", "Sandbox"]
