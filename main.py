"""The command line: `python main.py fit --config …`; `python main.py --help` lists every command."""

from embeddings.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
