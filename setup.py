"""The packages: `lightning_configs/` becomes a folder of the package, which pyproject.toml cannot say beside `find`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["embeddings*"]), "embeddings.lightning_configs"],
    package_dir={"embeddings.lightning_configs": "lightning_configs"},
)
