"""`python -m meshwright`: the same as the `meshwright` command."""

from .cli import process

if __name__ == "__main__":
    process()
