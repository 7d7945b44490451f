"""``turnkey eval``: a checkpoint or a server on the tasks of an environment, played as in training."""
