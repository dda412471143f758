"""What makes a run go on exactly: checkpoints, the rollout being trained on, the ledger."""
