"""How turns go through a model: shared prefixes once, micro-batches packed, the head fused."""
