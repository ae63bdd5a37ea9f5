"""Execute compiled Triton kernels on the CPU: their PTX, instruction by instruction, with every access checked.

`program` reads PTX; `executor` runs it on `checked_memory`; `opcodes` is the table of arithmetic instructions;
`launcher` puts the executor in the place of a GPU, `device` simulates the device around it; `plugin` has pytest's
fixtures. Nothing here knows rlplus.
"""

pytest_plugins = ("ptxcheck.plugin",)  # for `-p ptxcheck`: to import the package alone must not change Triton
