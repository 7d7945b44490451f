"""Episodes: the agent loop, what it records and what it logs."""
