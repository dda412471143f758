"""What is left after training: versions of the adapter, merged weights, the Hub, the model card."""
