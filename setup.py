"""Package ``verl_turnkey`` from ``src``, whose folders are links to the five rooms; the rest is in pyproject.toml.

Through the links editors and type checkers resolve every import in a clone. A room is never importable by its bare
name: verl checkouts have a ``recipe`` too.
"""

from setuptools import find_namespace_packages, setup

setup(
    # Folders of data (templates, YAML) count as packages too, or a wheel would leave them out one day.
    packages=[name for name in find_namespace_packages("src") if "__pycache__" not in name],
    package_dir={"": "src"},
    package_data={"": ["py.typed", "*.yaml", "*.txt", "*.js", "*.css", "*.json"]},
)
