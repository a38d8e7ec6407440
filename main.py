"""The command line: `python main.py fit --config …`; `python main.py --help` lists every command."""

from embeddings.cli.main import main
from embeddings.common.signals import ignore_stop_signals

if __name__ == "__main__":
    code = main()
    # The run has ended; what came on the way out would only change how that looks.
    ignore_stop_signals()
    raise SystemExit(code)
