"""What pyproject.toml cannot say: the packages that are found, and one that lies beside them in the checkout."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["glm46*"]), "glm46.train_configs"],
    package_dir={"glm46.train_configs": "train_configs"},
)
