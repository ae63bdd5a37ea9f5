"""Runs untrusted programs inside a sandbox. Started by path, by sandbox.py, with nothing of the parent's environment.

    python -I -S jail '{"own": true, "root": FOLDER, "read": [FOLDER, ...], "packages": [FOLDER, ...],
                        "memory": BYTES, "seconds": CPU TIME, "processes": NUMBER}' < JOB

`own`: enter new namespaces (namespaces.py), where FOLDER becomes the root directory, with the folders of `read`,
read-only, and an empty, writable /program in memory. Otherwise bubblewrap has done that, or there are no namespaces.
In either case: a new session keyring, a filter of system calls (syscalls.py) and limits (start.py) before the first
program. JOB and the replies are described in programs.py. The modules import nothing but each other and the standard
library, and all of it before the root directory changes.
"""
