"""Execute compiled Triton kernels on the CPU: their PTX, instruction by instruction, with every access checked.

`program` reads PTX; `executor` runs it on `checked_memory`; `opcodes` is the table of arithmetic instructions;
`launcher` puts the executor in the place of a GPU, `device` simulates the device around it. Nothing here knows rlplus.
"""
