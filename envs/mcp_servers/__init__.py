"""Tools of MCP servers: ``servers`` reads the file that names them, ``session`` talks to one, ``tools`` is what an
episode has of all.
"""
