"""What is read and said: the gates' text protocol, workflows, and the loop that collects trajectories."""
