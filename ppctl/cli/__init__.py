"""The command line. The only importer of hydra and omegaconf."""

from ppctl.cli.entry import console_script, main

__all__ = ["console_script", "main"]
