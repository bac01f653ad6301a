"""The version of the package, read by the build as text."""

__version__ = "0.1.0"
