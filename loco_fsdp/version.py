"""The version of the library: the build, the documentation and checkpoints take it from here."""

__version__ = "0.1.0"
