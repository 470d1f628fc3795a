"""`python -m ppctl.cli`: what the jobs of a sweep run."""

from ppctl.cli import console_script

if __name__ == "__main__":
    console_script()
