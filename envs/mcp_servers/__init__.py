"""Tools of MCP servers: ``servers`` reads the file that names them, ``tools`` has an episode's sessions and tools."""
