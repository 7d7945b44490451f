"""Runs an agent that was not written for this package, for one episode: as a function or a command, or in a sandbox."""
