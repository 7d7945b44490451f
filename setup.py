"""Map the five top-level rooms to ``verl_turnkey.<room>``; everything else is in pyproject.toml.

``verl_turnkey`` itself is a namespace package without ``__init__.py``. A room is never importable by its bare
name once installed: verl checkouts have a ``recipe`` of their own.
"""

from setuptools import find_namespace_packages, setup

ROOMS = ("advantage", "losses", "envs", "plugins", "recipe")
# Folders of data (templates, YAML) count as packages too, or a wheel would leave them out one day.
FOLDERS = {room: [sub for sub in find_namespace_packages(room) if "__pycache__" not in sub] for room in ROOMS}

setup(
    packages=[f"verl_turnkey.{name}" for room in ROOMS for name in (room, *(f"{room}.{sub}" for sub in FOLDERS[room]))],
    package_dir={f"verl_turnkey.{room}": room for room in ROOMS},
    package_data={"": ["py.typed", "*.yaml", "*.txt", "*.js", "*.css", "*.json"]},
)
