"""How an agent that was not written for this package is run for one episode: as a function, a command, in a sandbox."""
