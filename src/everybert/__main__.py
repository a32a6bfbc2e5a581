"""`python -m everybert` is the `everybert` command (and what `torchrun -m` starts)."""

from everybert.cli.main import run

if __name__ == "__main__":
    run()
