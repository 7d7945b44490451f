"""What a run is asked for: the node ``turnkey``, its schema, and the command line as it was typed."""
