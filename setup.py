"""The build has nothing of its own: everything is declared in pyproject.toml. Optional extensions are declared here."""

from setuptools import setup

setup()
