"""ALFWorld: the environment, and a generator of games for where its data cannot be downloaded."""
