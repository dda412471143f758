"""Who samples: the training model itself, vLLM servers, or any chat server."""
