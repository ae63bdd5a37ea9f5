"""The backends of the fused operations, and the choice among them."""
