"""Map the five top-level rooms to ``verl_turnkey.<room>``; everything else is in pyproject.toml.

``verl_turnkey`` itself is a namespace package without ``__init__.py``. A room is never importable by its bare
name once installed: verl checkouts have a ``recipe`` of their own.
"""

from setuptools import find_packages, setup

ROOMS = ("advantage", "losses", "envs", "plugins", "recipe")

packages: list[str] = []
for room in ROOMS:
    packages += [f"verl_turnkey.{room}"] + [f"verl_turnkey.{room}.{sub}" for sub in find_packages(room)]

setup(
    packages=packages,
    package_dir={f"verl_turnkey.{room}": room for room in ROOMS},
    package_data={f"verl_turnkey.{room}": ["py.typed", "*.yaml", "**/*.yaml", "**/*.txt"] for room in ROOMS},
)
