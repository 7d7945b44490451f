"""The configuration of a run: the schema of the node ``turnkey``, and the command line as typed."""
