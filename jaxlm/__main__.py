"""`python -m jaxlm` is `jaxlm`."""

from jaxlm.cli.main import entry

if __name__ == "__main__":
    entry()
