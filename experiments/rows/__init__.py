"""Which rows, blocks and digits of the backward pass matter, on a language model's head and its own samples."""
