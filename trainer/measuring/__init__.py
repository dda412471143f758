"""What is logged: every metric's definition, the behavior check, and the log of an update."""
