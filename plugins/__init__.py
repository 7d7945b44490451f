"""The only room that imports verl: registration, configuration, agent loop, trainer, CPU platform, command line.

Importing this package imports nothing else: it is loaded while ``import verl`` is still running.
"""
