"""The command line of an installed package: `python -m embeddings fit --config …`."""

from embeddings.cli.main import run

if __name__ == "__main__":
    run()
