"""How a policy is judged: metrics with intervals, paired differences, forced gates."""
