"""Findings of tests/ptx in the product's kernels that are known: docs/kernels.md, "Bits"."""

# The lanes of a warp that hold one sum store it at one address of shared memory, and have it in other last bits: Triton
# fuses the product e d into the first addition of the exchange between lanes, e_i d_i + round(e_j d_j) in lane i and
# e_j d_j + round(e_i d_i) in lane j. Which lane's number stays is not defined.
KNOWN = "_tile_kernel: two lanes store different values at one address of shared memory"
