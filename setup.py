"""Which packages are installed: the five folders, below one name. All else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("kernels", "model", "runtime", "probes", "scripts")
# Folders of data too: of what lies in them pyproject.toml says what is taken.
found = find_namespace_packages(
    include=[name for folder in FOLDERS for name in (folder, f"{folder}.*")], exclude=["*__pycache__*"]
)
setup(package_dir={"fathom": "."}, packages=[f"fathom.{name}" for name in found])
