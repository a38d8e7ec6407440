"""The command line: `python main.py fit --config …`; `python main.py --help` lists every command."""

from embeddings.cli.main import run

if __name__ == "__main__":
    run()
