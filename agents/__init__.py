"""Training, export and evaluation of agents that choose draft depths, and the command line."""
