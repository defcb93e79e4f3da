"""Run `jaxlm` as `python -m jaxlm`."""

from jaxlm.cli.main import entry

if __name__ == "__main__":
    entry()
