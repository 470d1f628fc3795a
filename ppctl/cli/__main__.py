"""`python -m ppctl.cli`: the command line, as the jobs of a sweep start it."""

from ppctl.cli import console_script

if __name__ == "__main__":
    console_script()
