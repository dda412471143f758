"""What is trained: advantages, the clipped surrogate, exact KL, and one rollout as weighted slices."""
