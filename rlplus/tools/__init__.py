"""The commands around training: they may import the trainer, which imports none of them."""
