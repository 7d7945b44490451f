"""Tools of MCP servers: ``servers`` reads the file that names them, ``session`` talks to one, ``tools`` has an
episode's tools of all servers.
"""
