"""The objective in plain PyTorch: the definition that every backend must match."""
